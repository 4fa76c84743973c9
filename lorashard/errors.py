"""The errors that lorashard raises on purpose; each message says what was expected, found, where, and what to do."""


class LorashardError(Exception):
    """Base of lorashard's own errors."""


class UserError(LorashardError):
    """Something the person can mend: the command line reports it in one line and exits with code 2."""


class ConfigError(UserError):
    """An option, a configuration file or an environment that cannot work."""


class DataError(UserError):
    """A dataset, or a row of it, that cannot be trained on."""


class CheckpointError(UserError):
    """A model folder, weight file or adapter that is missing, damaged or does not match."""


class VerificationError(LorashardError):
    """What was to be equal is not: the command line reports it in one line and exits with code 1."""


class TrainingError(LorashardError):
    """Numbers that no training comes back from: the command line reports it in one line and exits with code 1."""


class RunStopped(LorashardError):
    """A run that was asked to stop, and has: the command line says what was saved and exits with code 75."""


class ShardError(LorashardError):
    """A use of the engine that would give wrong numbers: a sharded weight read, ranks that diverged, no slot left."""

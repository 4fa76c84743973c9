"""Who may log in: accounts with passwords, or whoever has the token of the server; and their sessions."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from pathlib import Path

from lorashard.errors import ConfigError

_NO_USER = ""  # whose password is the token; no line of a file names it
SESSION_S = 7 * 24 * 3600
_MAX_SESSIONS = 1000


class Accounts:
    """User accounts and open sessions; passwords are kept as salted digests only."""

    def __init__(self, passwords: dict[str, str]) -> None:
        self._salt = secrets.token_bytes(16)
        self._digests = {user: self._digest(password) for user, password in passwords.items()}
        self._nobody = secrets.token_bytes(32)
        self._sessions: dict[str, float] = {}

    @classmethod
    def of_token(cls, token: str) -> Accounts:
        """Return what lets in whoever has a token, under no user name."""
        return cls({_NO_USER: token})

    @property
    def is_token(self) -> bool:
        """Whether a token is asked for, not a user's password."""
        return _NO_USER in self._digests

    @classmethod
    def read(cls, auth: str) -> Accounts:
        """Read the accounts of `--auth`: a file of lines `user:password`, or one such pair.

        Raises:
            ConfigError: the file cannot be read, or other users can read it. The error never contains a password.
        """
        path = Path(auth).expanduser()
        if ":" in auth and not path.is_file():
            return cls(dict([_split(auth, None)]))
        try:
            mode = path.stat().st_mode
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the file cannot be read ({getattr(error, 'strerror', None) or 'it is not text'})",
                option="auth",
                expected="user:password, or a text file with such a line for each user",
            ) from error
        if mode & 0o077:
            raise ConfigError(f"other users can read the passwords in {auth}", option="auth", fix=f"chmod 600 {auth}")
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
        pairs = [_split(line, f"{auth}, line {number}") for number, line in lines if line and line[0] != "#"]
        if not pairs:
            raise ConfigError(option="auth", expected="a line user:password for each user", found="none", where=auth)
        if len(dict(pairs)) < len(pairs):
            raise ConfigError("a user has two lines", option="auth", where=auth, fix="keep one")
        return cls(dict(pairs))

    def open_session(self, user: str, password: str) -> str | None:
        """Return the word of a new session, or None if the user or the password is wrong."""
        if not self._is_right(user, password):
            return None
        now = time.monotonic()
        kept = sorted((end_s, word) for word, end_s in self._sessions.items() if end_s > now)
        self._sessions = {word: end_s for end_s, word in kept[-_MAX_SESSIONS + 1 :]}
        session = secrets.token_urlsafe(32)
        self._sessions[session] = now + SESSION_S
        return session

    def open_by_token(self, token: str) -> str | None:
        """Return the word of a new session, or None if the token is wrong or none is asked for."""
        return self.open_session(_NO_USER, token)

    def knows_token(self, token: str) -> bool:
        """Return whether this is the token, in constant time."""
        return self._is_right(_NO_USER, token)

    def has_session(self, session: str) -> bool:
        """Return whether a session is open: neither expired nor closed."""
        return self._sessions.get(session, 0.0) > time.monotonic()

    def close_session(self, session: str) -> None:
        """End a session, if it is one."""
        self._sessions.pop(session, None)

    def _is_right(self, user: str, password: str) -> bool:
        """Compare, in the same time for an unknown user as for a wrong password."""
        return hmac.compare_digest(self._digest(password), self._digests.get(user, self._nobody))

    def _digest(self, password: str) -> bytes:
        return hashlib.sha256(self._salt + os.fsencode(password)).digest()


def _split(pair: str, where: str | None) -> tuple[str, str]:
    user, colon, password = pair.partition(":")
    if not (user.strip() and colon and password):
        raise ConfigError(option="auth", where=where, expected="user:password, neither of them empty")
    return user.strip(), password

"""The folder of a run and what lies in it: checkpoints and their manifests, status, the lock of its owner, its name.

Standard library only, since the launcher, the UI and every rank read it. What happens in a run is in `training`.
"""

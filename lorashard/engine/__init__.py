"""The engine: a sharded, frozen base under torch modules. Knows torch only, nothing of Hugging Face.

Reading order: layout, copies, home, placeholder, slots, streams, unit, schedule, autograd, engine.
"""

from .copies import HostCopies
from .engine import Engine, Stats, Visit
from .home import DeviceHome, FileHome, Home, HostHome
from .layout import Layout, Piece, plan_layout
from .placeholder import Placeholder
from .unit import Owner, State, Unit, Weight

__all__ = [
    "DeviceHome",
    "Engine",
    "FileHome",
    "Home",
    "HostCopies",
    "HostHome",
    "Layout",
    "Owner",
    "Piece",
    "Placeholder",
    "State",
    "Stats",
    "Unit",
    "Visit",
    "Weight",
    "plan_layout",
]

"""The engine: a sharded, frozen base under torch modules. Knows torch only, nothing of Hugging Face.

Reading order: layout, copies, home, placeholder, slots, streams, unit, schedule, autograd, engine.
"""

from .copies import HostCopies
from .engine import Engine
from .home import DeviceHome, FileHome, Home, HostHome
from .layout import Layout, Part, Piece, plan_layout
from .placeholder import FrozenWeight, Placeholder
from .schedule import ScheduleEntry
from .stats import Stats
from .unit import Owner, State, Unit, Weight

__all__ = [
    "DeviceHome",
    "Engine",
    "FileHome",
    "FrozenWeight",
    "Home",
    "HostCopies",
    "HostHome",
    "Layout",
    "Owner",
    "Part",
    "Piece",
    "Placeholder",
    "ScheduleEntry",
    "State",
    "Stats",
    "Unit",
    "Weight",
    "plan_layout",
]

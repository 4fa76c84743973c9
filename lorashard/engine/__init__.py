"""The engine: a sharded, frozen base under torch modules. Knows torch only, nothing of Hugging Face.

Reading order: layout, copies, home, stand_in, placeholder, packed, slots, streams, unit, schedule, autograd, engine.
"""

from .copies import HostCopies
from .engine import Engine, ScheduleEntry
from .home import DeviceHome, FileHome, Home, HostHome
from .layout import Layout, Piece, plan_layout
from .packed import Packed, Packing, Part, Workspace
from .placeholder import Placeholder
from .stats import Stats
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
    "Packed",
    "Packing",
    "Part",
    "Piece",
    "Placeholder",
    "State",
    "Stats",
    "Unit",
    "ScheduleEntry",
    "Weight",
    "Workspace",
    "plan_layout",
]

"""The engine: a sharded, frozen base under torch modules. Knows torch only, nothing of Hugging Face.

Reading order: layout, file_range, copies, home, placeholder, slots, streams, unit, reader, schedule,
autograd, links, turns, engine.
"""

from .copies import HostCopies
from .engine import Engine
from .file_range import FileRange, HostBytes, OpenFile
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
    "FileRange",
    "FrozenWeight",
    "Home",
    "HostBytes",
    "HostCopies",
    "HostHome",
    "Layout",
    "OpenFile",
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

"""The engine: a sharded, frozen base under torch modules. Knows torch only, nothing of Hugging Face.

Reading order: layout, home, placeholder, slots, streams, unit, schedule, autograd, engine.
"""

from .engine import Engine, Stats, Visit
from .home import DeviceHome
from .layout import Layout, Piece, plan_layout
from .placeholder import Placeholder
from .unit import Owner, State, Unit, Weight

__all__ = [
    "DeviceHome",
    "Engine",
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

"""What the start of each process does about garbage."""

from __future__ import annotations

import subprocess
import sys

CHECK = """
import gc
from lorashard.runtime.importing import quick_imports

with quick_imports():
    assert not gc.isenabled()
    import json.tool
assert gc.isenabled() and gc.get_freeze_count() > 1000
try:
    with quick_imports():
        import no_such_module
except ImportError:
    assert gc.isenabled()
gc.disable()
with quick_imports():
    pass
assert not gc.isenabled()
"""


def test_garbage_is_collected_again_after_imports():
    """A process that has imported, or failed to, and whose memory grows for ever; or a choice that is overruled."""
    subprocess.run([sys.executable, "-c", CHECK], check=True, timeout=60)

"""What Python runs first where this folder is in PYTHONPATH: garbage is collected seldom, which makes starts shorter.

For scripts that tests start and that import torch and the like by themselves; see lorashard.runtime.importing.
"""

import gc

gc.set_threshold(100_000, 50, 1000)

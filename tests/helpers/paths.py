"""Where the tests find the project's own files."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DEMO = EXAMPLES / "demo"
DEMO_BASE = DEMO / "base"
MODELS = ROOT / "tests/models"

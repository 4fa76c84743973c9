"""What a `sitecustomize.py` of a test does once the module that it changes has been imported."""

_SCRIPT = """
import importlib.machinery, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            {change}(module)
        spec.loader.exec_module = exec_module
        return spec

if {module!r} in sys.modules:  # of a process that is forked from one which has imported everything
    {change}(sys.modules[{module!r}])
else:
    sys.meta_path.insert(0, Finder())
"""


def call_after_import(module: str, change: str) -> str:
    """Return the lines of a script that call its function `change` with a module, at once or when it is imported."""
    return _SCRIPT.format(module=module, change=change)

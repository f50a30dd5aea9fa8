# For pyright, which would read four thousand files of Transformers for seven names: a third of its time.
from typing import Any

def __getattr__(name: str) -> Any: ...

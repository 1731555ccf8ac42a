"""What a process knows of pickled layouts."""

from flatweights import _layout


def forget_layouts() -> None:
    """Forget pickled and unpickled layouts, as in a new process."""
    _layout._pickled_here.clear()
    _layout._rebuild.cache_clear()
    _layout._last_unpickled = None

"""What a process knows of pickled layouts."""

from flatweights import _layout


def forget_layouts() -> None:
    """Forget pickled and unpickled layouts, as in a new process."""
    _layout._recent = ()

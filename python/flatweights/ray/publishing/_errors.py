"""The errors of publishers and subscribers."""


class SupersededError(RuntimeError):
    """Another publisher of the same name has taken over."""


class StaleWeightsError(RuntimeError):
    """The newest weights are older than ``max_age`` of a subscriber."""


def in_call_error(owner: str) -> RuntimeError:
    """Return the error of a call within another call of the same thread, as in a signal handler.

    It would wait for that call for ever.
    """
    return RuntimeError(
        f"this thread is in a call of the {owner} already. In a signal handler, set a flag, and "
        "make the call later"
    )

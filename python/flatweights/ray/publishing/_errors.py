"""The errors of publishers and subscribers."""


class SupersededError(RuntimeError):
    """Another publisher of the same name has taken over."""


class StaleWeightsError(RuntimeError):
    """The newest weights are older than ``max_age`` of a subscriber."""

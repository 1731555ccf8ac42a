"""`TensorFlowVariables`: the weights of a TensorFlow model as one vector or one buffer."""

from flatweights._frameworks import register
from flatweights.tensorflow._variables import TensorFlowVariables

__all__ = ["TensorFlowVariables"]

register("tensorflow", TensorFlowVariables)

"""`TensorFlowVariables`: the weights of a TensorFlow model as one vector or one buffer."""

from flatweights.tensorflow._variables import TensorFlowVariables

__all__ = ["TensorFlowVariables"]

"""A program that measures what rounds on an NVIDIA GPU would cost."""

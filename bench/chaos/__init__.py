"""Trainings whose processes are killed, stopped and fed nonsense, beside an oracle of every bit.

``python -m bench.chaos --minutes 30 --seed 1 --members`` runs one of five modes for a while and
says what came of it. The tests run the same modes for seconds.
"""

"""Trainings whose processes are killed, stopped and misled, and an oracle of every bit.

``python -m bench.chaos --minutes 30 --seed 1 --members`` runs one of five modes for a while and
reports the outcome. The tests run the same modes for seconds.
"""

"""The day a GPU is there: numbers, speed and a training run on it, in one go and one report.

``python -m recollect.benchmarks.gpu`` (``make gpu`` in a checkout) runs the stages of `stages` one
after the other, each in a process of its own and within a time of its own, and writes what came of
them to ``results/gpu``: a JSON file per stage, and a README made of these. Without a GPU the same
script runs to its end on the CPU, at sizes that show that it does and nothing else, and says so.
"""

"""The parts of gpu_check.py, by subject. Each part is a function of the options that returns rows."""

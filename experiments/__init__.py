"""Datasets, evaluation on matched cases, benchmarks, and the training of the bundled host."""

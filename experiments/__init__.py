"""The catalogue of runs: systems, experiments, engines, reports, benchmarks, and the command lines that start them."""

"""The catalogue of runs: systems, experiments, engines, reports, benchmarks and their command lines."""

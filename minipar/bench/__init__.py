"""What is measured: `python -m minipar bench`."""

from minipar.bench.step import bench_step

__all__ = ["bench_step"]

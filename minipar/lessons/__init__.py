"""What a learner runs: `python -m minipar.lessons.NAME`, alone or under mpirun."""

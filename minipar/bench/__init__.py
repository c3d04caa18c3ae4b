"""What is measured: `python -m minipar bench`."""

"""What happened when, on which rank: recording it, and showing it as text, picture and Perfetto trace."""

from minipar.trace.recorder import Message, Recorder, Span
from minipar.trace.timeline import Timeline

__all__ = ["Message", "Recorder", "Span", "Timeline"]

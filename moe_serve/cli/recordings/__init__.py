"""Recordings on disk as data: a journal's inputs log, and traces of expert load of several makers.

Responsible for opening them read-only, for their limits and for saying what is wrong with a file.
Must never change a recording, nor judge one, nor run what a file holds. Called by the replay
command and by benchmarks.

| file | holds | module |
|---|---|---|
| `.npz` | `topk_ids` by token, or counts | `arrays` |
| `.pt`, or a folder of them | what SGLang's recorder dumped, or a load window of vLLM | `dumps` |
| `.jsonl` | counts that vLLM logged | `stats_lines` |
| `inputs.db`, or its folder | every input of a service's engine | `journal` |
"""

from moe_serve.cli.recordings.journal import Segment, read_segments
from moe_serve.cli.recordings.kinds import is_journal, read_trace
from moe_serve.cli.recordings.trace import CountTrace, TokenTrace

__all__ = ["CountTrace", "Segment", "TokenTrace", "is_journal", "read_segments", "read_trace"]

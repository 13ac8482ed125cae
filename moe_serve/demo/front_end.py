"""The demo's front end, a process of its own: attention and gate here, experts behind gRPC, text
out.

Responsible for generating text from prompts whose domain changes, for comparing with the local
model, and for saying what it did as JSON lines on standard output. Imports no Ray and holds no
expert weight in the attached model. Started by `moe_serve.demo.run`.

The comparison model (the same checkpoint, with its experts, on this process's CPU) exists only to
check parity.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from moe_serve.client import Client
from moe_serve.demo.prompts import domain_at, load_prompts
from moe_serve.errors import MoeServeError
from moe_serve.frontends.transformers import Attachment, ExpertCall, attach, load_front_end

GREEDY_TOKENS = 12
"""Tokens of the greedy comparison of one prompt."""


class TextLine(msgspec.Struct, tag="text"):
    """One prompt and what was written after it."""

    at_s: float
    domain: str
    prompt: str
    text: str
    tokens: int


class ParityLine(msgspec.Struct, tag="parity"):
    """Logits of one whole sequence, remote against local. Times are monotonic seconds of this
    machine."""

    began_s: float
    ended_s: float
    domain: str
    max_abs_diff: float
    positions: int


class GreedyLine(msgspec.Struct, tag="greedy"):
    """Greedy continuation, remote against local."""

    domain: str
    equal: bool


class FailedLine(msgspec.Struct, tag="failed"):
    """A request that ended with an error."""

    at_s: float
    domain: str
    error: str


class SummaryLine(msgspec.Struct, tag="summary"):
    """Totals. `demand_pairs`: valid pairs of all answered layer calls, counted here."""

    requests: int
    layer_calls: int
    tokens: int
    failed_requests: int
    demand_pairs: int
    domains: dict[str, int]
    call_p50_s: float
    call_p99_s: float


Line = TextLine | ParityLine | GreedyLine | FailedLine | SummaryLine


@dataclass(slots=True)
class _Totals:
    requests: int = 0
    tokens: int = 0
    failed: int = 0
    calls: int = 0
    pairs: int = 0
    domains: dict[str, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def on_call(self, call: ExpertCall) -> None:
        """Count the valid pairs of an answered layer call."""
        valid = np.ones(call.topk_ids.shape, np.bool_)
        if call.pair_valid is not None:
            valid &= call.pair_valid
        if call.row_valid is not None:
            valid &= call.row_valid[:, None]
        self.calls += 1
        self.pairs += int(valid.sum())
        self.seconds.append(call.seconds)


class FrontEnd:
    """Generates until the time is over or it is told to stop."""

    def __init__(self, checkpoint: str, client: Client, *, batch: int, new_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self._torch = torch
        self._batch, self._new_tokens = batch, new_tokens
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._tokenizer.padding_side = "left"
        self._local = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, experts_implementation="eager"
        ).eval()
        self._remote = load_front_end(checkpoint)
        self._totals = _Totals()
        self._attachment: Attachment = attach(
            self._remote, client, name="demo", on_call=self._totals.on_call
        )
        self._prompts = load_prompts()
        self._turn = dict.fromkeys(self._prompts, 0)
        self.stopped = False

    def run(self, seconds: float) -> None:
        """Write text for `seconds`, then the totals."""
        began_s = time.monotonic()
        while not self.stopped and (passed_s := time.monotonic() - began_s) < seconds:
            self._one_batch(domain_at(passed_s / seconds))
        self._attachment.detach()
        totals = self._totals
        calls = np.array(totals.seconds or [0.0])
        _say(
            SummaryLine(
                requests=totals.requests,
                layer_calls=totals.calls,
                tokens=totals.tokens,
                failed_requests=totals.failed,
                demand_pairs=totals.pairs,
                domains=totals.domains,
                call_p50_s=float(np.quantile(calls, 0.5)),
                call_p99_s=float(np.quantile(calls, 0.99)),
            )
        )

    def _one_batch(self, domain: str) -> None:
        prompts = self._next_prompts(domain)
        inputs = self._tokenizer(
            prompts, return_tensors="pt", padding=True, add_special_tokens=False
        )
        try:
            with self._torch.inference_mode():
                self._write_text(domain, prompts, inputs)
        except MoeServeError as error:
            self._totals.failed += len(prompts)
            _say(FailedLine(at_s=time.monotonic(), domain=domain, error=f"{error.code}: {error}"))
        self._totals.requests += len(prompts)
        self._totals.domains[domain] = self._totals.domains.get(domain, 0) + 1

    def _next_prompts(self, domain: str) -> list[str]:
        pool, turn = self._prompts[domain], self._turn[domain]
        self._turn[domain] = turn + self._batch
        return [pool[(turn + number) % len(pool)] for number in range(self._batch)]

    def _write_text(self, domain: str, prompts: list[str], inputs: Any) -> None:
        torch = self._torch
        torch.manual_seed(self._totals.requests)  # the same text in every run
        output = self._remote.generate(
            **inputs,
            max_new_tokens=self._new_tokens,
            do_sample=True,
            temperature=0.8,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        start = inputs["input_ids"].shape[1]
        for row, prompt in enumerate(prompts):
            written = output[row, start:]
            tokens = int((written != self._tokenizer.pad_token_id).sum())
            self._totals.tokens += tokens
            text = self._tokenizer.decode(written, skip_special_tokens=True)
            _say(TextLine(time.monotonic(), domain, prompt, text, tokens))
        self._compare(domain, output, inputs)

    def _compare(self, domain: str, output: Any, inputs: Any) -> None:
        """Logits of the whole sequences, and the greedy continuation of one prompt, against the
        local model."""
        torch = self._torch
        grown = output.shape[1] - inputs["input_ids"].shape[1]
        mask = torch.cat(
            [inputs["attention_mask"], torch.ones(output.shape[0], grown, dtype=torch.long)], 1
        )
        # Two samples a prompt, of its own tokens without the padding of the batch: as it came, and
        # with what was written. Moves are short; more samples meet more of them.
        for row in range(output.shape[0]):
            whole = output[row : row + 1, mask[row].bool()]
            for sequence in (whole[:, : whole.shape[1] - grown], whole):
                began_s = time.monotonic()
                remote = self._remote(sequence).logits
                ended_s = time.monotonic()
                diff = float((remote - self._local(sequence).logits).abs().max())
                _say(ParityLine(began_s, ended_s, domain, diff, int(sequence.shape[1])))
        one = {name: tensor[:1] for name, tensor in inputs.items()}
        options = {
            "max_new_tokens": GREEDY_TOKENS,
            "do_sample": False,
            "pad_token_id": self._tokenizer.pad_token_id,
        }
        here, there = (
            self._local.generate(**one, **options),
            self._remote.generate(**one, **options),
        )
        equal = here.shape == there.shape and bool((here == there).all())
        _say(GreedyLine(domain, equal))


def _say(line: Line) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--addresses", required=True, help="routers, host:port, comma-separated")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=16)
    options = parser.parse_args()
    with Client(options.addresses.split(",")) as client:
        front_end = FrontEnd(
            options.checkpoint, client, batch=options.batch, new_tokens=options.new_tokens
        )

        def stop(number: int, frame: object) -> None:
            front_end.stopped = True

        signal.signal(signal.SIGTERM, stop)
        # Ctrl-C reaches the whole terminal group; the parent ends us in order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        front_end.run(options.seconds)


if __name__ == "__main__":
    main()

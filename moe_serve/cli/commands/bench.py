"""`moe-serve bench`: put load on a running service and say how it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_serve.bootstrap.record import read_record
from moe_serve.cli.beside import refuse_beside
from moe_serve.cli.exits import CannotReach, ExitCode
from moe_serve.cli.options import INT32_MAX, OutputOption, Reach, ServiceOption
from moe_serve.cli.output import Output, OutputFormat
from moe_serve.cli.progress import bar
from moe_serve.errors import InvalidArgument, NotFound
from moe_serve.rpc.auth import Role, TokenFile
from moe_serve.rpc.options import is_loopback

if TYPE_CHECKING:
    from moe_serve.bench import BenchLoad, BenchReport, Choices
    from moe_serve.cli.recordings import TokenTrace
    from moe_serve.client import ModelSpec

SPEC_TIMEOUT_S = 10.0
KNOW = "--i-know"


@dataclass(frozen=True, slots=True)
class Routers:
    """Where requests go, and what lets them in; empty = not needed. of_record: whether a recorded
    service is there."""

    addresses: tuple[str, ...]
    token: str = ""
    tls_ca: Path | None = None
    of_record: bool = False

    def __repr__(self) -> str:  # a token must not reach a traceback
        return f"Routers({self.addresses!r})"


RoutersArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ROUTER", help="Routers as host:port. Default: those of the recorded service."
    ),
]
RateOption = Annotated[
    float,
    typer.Option(
        min=0.01, max=100_000.0, metavar="PER_SECOND", help="Open loop: requests a second."
    ),
]
ClosedOption = Annotated[
    int,
    typer.Option(
        min=0, max=4096, metavar="CALLERS", help="Closed loop of so many callers instead."
    ),
]
SecondsOption = Annotated[
    float, typer.Option(min=0.1, max=86_400.0, help="How long requests become due.")
]
WarmUpOption = Annotated[
    float, typer.Option(min=0.0, max=600.0, metavar="SECONDS", help="Before, not counted.")
]
TokensOption = Annotated[int, typer.Option(min=1, max=65_536, help="Rows of a request.")]
MixOption = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, metavar="SHARE", help="Of the requests, that are decode."),
]
ZipfOption = Annotated[
    float,
    typer.Option(min=0.0, max=10.0, metavar="EXPONENT", help="Skew of the experts; 0 = all alike."),
]
ShiftOption = Annotated[
    float,
    typer.Option(
        min=0.0, max=86_400.0, metavar="SECONDS", help="Other experts are hot each so often."
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Experts as recorded: .npz with topk_ids."),
]
SloOption = Annotated[
    float | None,
    typer.Option(min=0.001, max=3.6e6, metavar="MS", help="Target that goodput counts by."),
]
TimeoutOption = Annotated[
    float, typer.Option(min=0.001, max=3600.0, metavar="SECONDS", help="Of a request.")
]
SeedOption = Annotated[int, typer.Option(min=0, max=INT32_MAX, help="Of all that is drawn.")]
KnowOption = Annotated[bool, typer.Option(KNOW, help="Also where a router is on another machine.")]


def bench(  # noqa: PLR0913, PLR0917  # its parameters are the command's options
    ctx: typer.Context,
    address: RoutersArgument = None,
    service: ServiceOption = "",
    rate: RateOption = 50.0,
    closed: ClosedOption = 0,
    seconds: SecondsOption = 10.0,
    warm_up: WarmUpOption = 1.0,
    tokens: TokensOption = 8,
    phase_mix: MixOption = 0.9,
    zipf: ZipfOption = 1.0,
    shift: ShiftOption = 0.0,
    trace: TraceOption = None,
    slo_ms: SloOption = None,
    timeout: TimeoutOption = 30.0,
    seed: SeedOption = 0,
    i_know: KnowOption = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Put load on a service, and print latency, goodput, errors and rows a second.

    Open loop: requests are due at random times at --rate, whatever the service does, and latency
    counts from when a request was due. Outputs are not checked. It is real load: --i-know is needed
    for anything but this machine. Exit 1 where nothing was answered.
    """
    from moe_serve.bench import BenchLoad

    out = Output(output)
    if trace is not None:
        refuse_beside(ctx, ("zipf", "shift"), "--trace", "it says which experts are hot; give one")
    if closed:
        refuse_beside(ctx, ("rate",), "--closed", "callers send again once answered; give one")
    reach = ctx.find_object(Reach) or Reach()
    routers = _routers(tuple(address or ()), service, reach.token_file, reach.tls_ca)
    if not routers.of_record:
        why = "they are not the recorded ones of that service; give one"
        refuse_beside(ctx, ("service",), ", ".join(routers.addresses), why)
    _check_near(routers.addresses, i_know)
    load = BenchLoad(
        rate_per_s=rate,
        callers=closed,
        seconds=seconds,
        tokens=tokens,
        decode_share=phase_mix,
        warm_up_s=warm_up,
        timeout_s=timeout,
        target_s=None if slo_ms is None else slo_ms / 1e3,
        seed=seed,
    )
    recorded = None if trace is None else _recorded(trace)

    def choices(spec: ModelSpec) -> Choices:
        _check_near(spec.router_addresses, i_know)
        return _choices(spec, load, zipf, shift, recorded)

    total = round(load.warm_up_s + load.seconds)
    with bar(out, "seconds of load", total) as shown:
        found = asyncio.run(
            _run(routers, load, choices, lambda done_s: shown.tell(int(done_s), total))
        )
    from moe_serve.cli.views.bench import bench_parts, bench_plain

    out.data(bench_plain(found), bench_parts(found))
    if not found.answered:
        raise typer.Exit(ExitCode.FAILED)


async def _run(
    routers: Routers,
    load: BenchLoad,
    choices: Callable[[ModelSpec], Choices],
    tell: Callable[[float], None],
) -> BenchReport:
    from moe_serve.bench import run_bench
    from moe_serve.client import AsyncClient

    async with AsyncClient(
        routers.addresses, token=routers.token or None, tls_ca=routers.tls_ca
    ) as client:
        spec = await client.spec(timeout_s=SPEC_TIMEOUT_S)
        return await run_bench(client, spec, load, choices(spec), tell)


def _routers(
    addresses: tuple[str, ...], service: str, token_file: Path | None, tls_ca: Path | None
) -> Routers:
    """Those given, else those recorded. Raises CannotReach, StartRefused."""
    try:
        record = read_record(service)
    except NotFound as error:
        if not addresses:
            raise CannotReach(error.message) from error
        of_record = False
    else:
        known = set(record.router_addresses)
        if not addresses and not known:
            raise CannotReach(f"service {record.service} is being started; wait")
        of_record = set(addresses) <= known
        if of_record:
            addresses = addresses or record.router_addresses
            token_file = token_file or (Path(record.token_file) if record.token_file else None)
            tls_ca = tls_ca or (Path(record.tls_ca_file) if record.tls_ca_file else None)
    token = "" if token_file is None else TokenFile(token_file).token(Role.DISPATCH)
    return Routers(addresses, token, tls_ca, of_record)


def _check_near(addresses: Sequence[str], i_know: bool) -> None:
    """Raise InvalidArgument where a router is not on this machine and nobody said that it may."""
    far = [one for one in addresses if not is_loopback(one.rpartition(":")[0])]
    if far and not i_know:
        raise InvalidArgument(
            f"{far[0]} is not on this machine, and others may be served there; give {KNOW} to put "
            "load on it"
        )


def _recorded(file: Path) -> TokenTrace:
    from moe_serve.cli.recordings import TokenTrace, is_journal, read_trace

    found = None if is_journal(file) else read_trace(file)
    if not isinstance(found, TokenTrace):
        raise InvalidArgument(
            f"--trace {file} holds counts, which name no tokens; give one with topk_ids"
        )
    return found


def _choices(
    spec: ModelSpec, load: BenchLoad, zipf: float, shift: float, recorded: TokenTrace | None
) -> Choices:
    from moe_serve.bench import shifting_choices, traced_choices

    if recorded is not None:
        return traced_choices(
            recorded.ids,
            layers=spec.num_layers,
            experts=spec.num_experts,
            top_k=spec.top_k,
            tokens=load.tokens,
        )
    return shifting_choices(
        layers=spec.num_layers,
        experts=spec.num_experts,
        top_k=spec.top_k,
        tokens=load.tokens,
        exponent=zipf,
        seed=load.seed,
        every_s=shift,
        seconds=load.warm_up_s + load.seconds,
    )

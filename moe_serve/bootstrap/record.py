"""The service record: a small file that tells the CLI on this machine where a running service is.

Written by `up`, kept true by `status`, removed by `down`. Holds addresses and process ids, never a
secret.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from moe_serve.errors import NotFound, StartRefused


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where a running service is. `ray_pids` are the Ray nodes `up` started itself (and `down`
    ends), else empty. `state_dir`: as the service file says, empty for the default."""

    service: str
    ray_address: str
    namespace: str
    admin_address: str
    router_addresses: tuple[str, ...]
    dashboard_url: str
    config_file: str
    network: str
    ray_pids: tuple[int, ...] = ()
    ray_temp_dir: str = ""
    state_dir: str = ""
    token_file: str = ""
    tls_ca_file: str = ""
    ending: bool = False
    """Somebody is taking the service down."""


def state_home() -> Path:
    """Folder of all state of this user: $XDG_STATE_HOME/moe-serve or ~/.local/state/moe-serve."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "moe-serve"


def service_dir(service: str, state_dir: Path | None = None) -> Path:
    """Folder of one service's journal, manifest cache, keys and record; made on demand, mode
    0700. Raises StartRefused where it cannot be made."""
    return _made(state_dir if state_dir is not None else state_home() / service)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartRefused(
            f"folder {folder} cannot be made: {error.strerror}; choose another with `state_dir:` "
            "or XDG_STATE_HOME"
        ) from error
    return folder


@contextlib.contextmanager
def claimed(service: str) -> Iterator[None]:
    """Be the one program on this machine, for this user, that brings the service up. The claim ends
    with the program, however it ends.

    Raises StartRefused where another is at it: two controllers would write one journal.
    """
    with _locked(
        f"{service}.up.lock",
        f"another `moe-serve up` is starting service {service!r}; wait until it has ended",
    ):
        yield


@contextlib.contextmanager
def kept(service: str) -> Iterator[None]:
    """Be the one program on this machine, for this user, that starts the service again whenever it
    dies. Ends as a claim does. Raises StartRefused where another is at it."""
    with _locked(
        f"{service}.keep.lock",
        f"another `moe-serve up --keep` looks after service {service!r}; end that one first",
    ):
        yield


def is_kept(service: str) -> bool:
    """Whether a program on this machine starts the service again whenever it dies. Asking leaves
    nothing behind, whatever the name."""
    if "/" in service or not (state_home() / f"{service}.keep.lock").exists():
        return False
    try:
        with kept(service):
            return False
    except StartRefused:
        return True


@contextlib.contextmanager
def _locked(name: str, taken: str) -> Iterator[None]:
    with _writable(_made(state_home()) / name) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StartRefused(taken) from error
        yield


@contextlib.contextmanager
def _writable(file: Path) -> Iterator[int]:
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartRefused(
            f"{file} cannot be written: {error.strerror}; choose another folder with XDG_STATE_HOME"
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _record_file(service: str) -> Path:
    return state_home() / f"{service}.service.json"


def recorded_services() -> list[str]:
    """Names of the services that are recorded on this machine, in order."""
    files = state_home().glob("*.service.json")
    return sorted(file.name.removesuffix(".service.json") for file in files)


def write_record(record: ServiceRecord) -> None:
    """Write the record so that a reader sees the old one or the new one, never half of it. Raises
    StartRefused where it cannot be written."""
    file = _record_file(record.service)
    fresh = _made(file.parent) / f"{file.stem}.{os.getpid()}.tmp"
    try:
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2))
        fresh.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise StartRefused(
            f"the service record {file} cannot be written: {error.strerror}"
        ) from error


def read_record(service: str = "") -> ServiceRecord:
    """Record of a service; of the only one where no name is given. Raises NotFound naming what
    there is."""
    there = sorted(state_home().glob("*.service.json"))
    found = [file for file in there if service in ("", file.name.removesuffix(".service.json"))]
    if len(found) != 1:
        names = ", ".join(file.name.removesuffix(".service.json") for file in there) or "none"
        what = f"no record of service {service!r}" if service else "no single service record"
        step = "name one of those found, start one" if there else "start one"
        raise NotFound(
            f"{what} under {state_home()} (found: {names}); {step} with `moe-serve up -f FILE`, "
            "or give --address"
        )
    try:
        return msgspec.json.decode(found[0].read_bytes(), type=ServiceRecord)
    except FileNotFoundError as error:
        raise NotFound(f"{found[0]} was removed just now; its service has ended") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise NotFound(
            f"{found[0]} is damaged ({error}); remove it and run `moe-serve up` again"
        ) from error


def refresh_record(service: str, router_addresses: tuple[str, ...]) -> None:
    """Note where a running service's routers are now: one that was created anew may listen at
    another port. A record that cannot be read or written stays as it is."""
    with contextlib.suppress(NotFound, StartRefused, OSError):
        record = read_record(service)
        if router_addresses and record.router_addresses != router_addresses:
            write_record(msgspec.structs.replace(record, router_addresses=router_addresses))


def remove_record(service: str) -> None:
    """Forget a service."""
    _record_file(service).unlink(missing_ok=True)

"""``python -m transfer_queue serve`` runs a session as a daemon; ``status`` prints one that runs.

``units`` prints its storage units, ``drain UNIT`` moves everything off one, ``uncordon UNIT`` takes it in again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import Any

from transfer_queue import _calls, _remote, _session, config
from transfer_queue._joining_unit import JoiningUnit
from transfer_queue._ops import Op
from transfer_queue.errors import InvalidArgumentError, TransferQueueError


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m transfer_queue", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run controller and units until SIGTERM or Ctrl-C")
    serve.add_argument(
        "--units", type=int, help="number of storage units (default: of the configuration; 0: others join)"
    )
    serve.add_argument("--memory-limit-bytes", type=int, help="limit of each unit (default: of the configuration)")
    serve.add_argument("--namespace", help="name of the session (default: of the configuration)")
    serve.add_argument("--config", help="YAML file laid over the packaged configuration")
    serve.add_argument("--listen", metavar="tcp://HOST:PORT", help="also serve clients of other hosts, at this address")
    serve.add_argument(
        "--payload-port", type=int, help="port of their payload on the same host (default: any free one)"
    )
    serve.add_argument(
        "--join",
        metavar="tcp://HOST:PORT|NAME",
        help="add units of this host to the session there, or one unit of that name to the session of this host",
    )
    serve.add_argument(
        "--name", help="with --join tcp://...: what the names of the units begin with (default: name of this host)"
    )
    serve.add_argument("--security", choices=("token", "curve"), help="curve: encrypt what crosses (default: token)")
    status = commands.add_parser("status", help="print partitions, units and bytes")
    status.add_argument("--namespace", help="name of the session (default: of the configuration)")
    status.add_argument("--json", action="store_true", help="print JSON")
    units = commands.add_parser("units", help="print the storage units")
    drain = commands.add_parser("drain", help="move everything that a unit holds to others")
    drain.add_argument("--watch", action="store_true", help="show how far it is, and exit when it has ended")
    drain.add_argument("--dry-run", action="store_true", help="only print what there is to move")
    drain.add_argument("--rate-bytes-per-s", type=int, help="bytes that move in a second (default: as fast as it goes)")
    drain.add_argument("--deadline-s", type=float, help="seconds after which it ends (default: none)")
    uncordon = commands.add_parser("uncordon", help="let a unit take samples again")
    for command in (drain, uncordon):
        command.add_argument("unit", help="name of the unit")
    for command in (units, drain, uncordon):
        command.add_argument("--namespace", help="name of the session (default: of the configuration)")
    return parser


_SIGNALS = {signal.SIGTERM, signal.SIGINT}


def _conf(arguments: argparse.Namespace) -> Any:
    return config.load(_given(arguments))


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if getattr(arguments, "config", None):
        import yaml

        with open(arguments.config) as file:
            given = yaml.safe_load(file) or {}
    storage: dict[str, Any] = {}
    if getattr(arguments, "units", None) is not None:
        storage["num_data_storage_units"] = arguments.units
    if getattr(arguments, "memory_limit_bytes", None) is not None:
        storage["memory_limit_bytes"] = arguments.memory_limit_bytes
    if storage:
        backend = given.setdefault("backend", {})
        backend["SimpleStorage"] = {**backend.get("SimpleStorage", {}), **storage}
    if getattr(arguments, "listen", None) is not None:
        given["remote"] = {**(given.get("remote") or {}), "listen": arguments.listen}
    if getattr(arguments, "payload_port", None) is not None:
        given["remote"] = {**(given.get("remote") or {}), "payload_port": arguments.payload_port}
    if getattr(arguments, "security", None) is not None:
        given["security"] = arguments.security
    if arguments.namespace:
        given["namespace"] = arguments.namespace
    return given


def serve(arguments: argparse.Namespace) -> int:
    """Own a session, or host units of another one, until a signal ends it."""
    if arguments.join is not None:
        return _serve_units(arguments) if "://" in arguments.join else _serve_unit(arguments)
    units_join = arguments.units == 0
    if units_join:
        arguments.units = None
    conf = _conf(arguments)
    session = _session.open_session(conf, "own", units_join=units_join, keep=True)
    at = f", at {session.info.to_addr('requests')}" if session.info.ports else ""
    at += f", key {session.key.hex()}" if session.key else ""
    print(f"serving session {session.id}, process {session.owner_pid}{at}", flush=True)
    if session.info.ports and not os.environ.get("TQ_TOKEN", "").strip():
        print(f"token in {_remote.token_file(conf.namespace)}", flush=True)
    signal.sigwait(_SIGNALS)
    _session.close()
    print("closed", flush=True)
    return 0


def _serve_units(arguments: argparse.Namespace) -> int:
    from transfer_queue._joined import JoinedUnits

    given = _given(arguments)
    storage = (given.get("backend") or {}).get("SimpleStorage") or {}
    conf = config.load(given)
    listen, port = str(conf.remote.listen or ""), int(conf.remote.payload_port or 0)
    count = int(storage.get("num_data_storage_units") or 1)
    own = {name: value for name, value in storage.items() if name != "num_data_storage_units"}
    units = JoinedUnits(arguments.join, count, arguments.name or "", conf, own, listen, port)
    for host in units.hosts:
        print(f"unit {host.address.id} at {host.address.to_addr('requests')}", flush=True)
    print(f"serving {count} units of session {units.session}", flush=True)
    units.keep(_SIGNALS)
    units.close()
    print("closed", flush=True)
    return 0


def _serve_unit(arguments: argparse.Namespace) -> int:
    if arguments.units is not None or arguments.listen is not None or arguments.payload_port is not None:
        raise InvalidArgumentError("--join: a unit has no --units, --listen and --payload-port")
    unit = JoiningUnit(_conf(arguments), arguments.join, arguments.memory_limit_bytes)
    print(f"serving unit {arguments.join} of session {unit.session}, process {os.getpid()}", flush=True)
    unit.run(_SIGNALS)
    unit.close()
    print("closed", flush=True)
    return 0


def _summary() -> dict[str, Any]:
    from transfer_queue import _lost  # these need torch; a daemon does not
    from transfer_queue.client import unit_infos

    session = _session.current()
    call = _calls.Call(Op.STATUS, b"", lambda reply: _calls.decode(reply.body), timeout=session.timeout_s)
    version, pid, uptime, clients, partitions, units, *_ = _calls.run(session.handle, call)
    return {
        "version": version,
        "pid": pid,
        "uptime_s": uptime,
        "clients": clients,
        "partitions": [_partition(row) for row in partitions or []],
        "units": [unit._asdict() for unit in unit_infos(units or [])],
        "lost": _calls.run(session.handle, _lost.lost(session, None, None)),
    }


def _partition(row: list[Any]) -> dict[str, Any]:
    name, samples, keys, fields, tasks, consumed, *_ = row
    names = _calls.decode(tasks) if tasks else []
    counts = _calls.decode_ints(consumed)
    return {
        "name": name,
        "samples": samples,
        "keys": keys,
        "fields": _calls.decode(fields) if fields else [],
        "consumed": dict(zip(names, counts, strict=True)),
    }


def status(arguments: argparse.Namespace) -> int:
    """Print the session of this host."""
    _session.open_session(_conf(arguments), "attach")
    summary = _summary()
    if arguments.json:
        print(json.dumps(summary, indent=2))
        return 0
    print(f"TransferQueue {summary['version']}, process {summary['pid']}, up {summary['uptime_s']} s, ", end="")
    print(f"{summary['clients']} clients")
    _print_units(summary["units"])
    for part in summary["partitions"]:
        consumed = ", ".join(f"{task} {n}" for task, n in part["consumed"].items()) or "nothing"
        fields = ", ".join(part["fields"])
        print(
            f"  partition {part['name']!r}: {part['samples']} samples, {part['keys']} keys, fields [{fields}], ", end=""
        )
        print(f"consumed: {consumed}")
        if lost := summary["lost"].get(part["name"]):
            some = ", ".join(f"{name!r} [{', '.join(of)}]" for name, of in list(lost.items())[:_FEW])
            print(f"    lost with a unit: {some}{f' and {len(lost) - _FEW} more' if len(lost) > _FEW else ''}")
    return 0


_FEW = 5  # of a long list


def _print_units(units: list[dict[str, Any]]) -> None:
    for unit in units:
        limit = f" of {unit['memory_limit_bytes']:,}" if unit["memory_limit_bytes"] else ""
        print(
            f"  {unit['unit_id']:<10} {unit['state']:<8} {unit['memory_used_bytes']:>16,}{limit} bytes in memory, ",
            end="",
        )
        print(f"{unit['samples']} samples, {unit['cells']} cells")
        if unit["disk_cells"] or unit["written_cells"] or unit["spilled_cells"]:
            print(_on_disk(unit))


def units(arguments: argparse.Namespace) -> int:
    """Print the units of the session of this host."""
    _session.open_session(_conf(arguments), "attach")
    _print_units(_summary()["units"])
    return 0


def drain(arguments: argparse.Namespace) -> int:
    """Begin to drain a unit, and with ``--watch`` wait until that has ended."""
    from transfer_queue import _drain

    _session.open_session(_conf(arguments), "attach")
    job = _drain.drain(
        arguments.unit,
        rate_bytes_per_s=arguments.rate_bytes_per_s,
        deadline_s=arguments.deadline_s,
        dry_run=arguments.dry_run,
        progress=arguments.watch and sys.stderr.isatty(),
    )
    status = job.wait() if arguments.watch else job.status()
    of = sum(tier.bytes_total for tier in (status.memory, status.disk))
    moved = sum(tier.bytes_moved for tier in (status.memory, status.disk))
    cells = f"{status.cells_moved} of {status.cells_total} cells, {moved:,} of {of:,} bytes moved"
    print(f"job {status.job_id}: unit {status.unit_id} {status.state}, {cells}{status.error and f': {status.error}'}")
    for name, tier in ("memory", status.memory), ("disk", status.disk):
        if tier.bytes_fit is not None:
            print(f"  {name}: room for {tier.bytes_fit:,} of {tier.bytes_total:,} bytes")
    for reason, count in status.blocked.items():
        print(f"  {reason}: {count}")
    for cell in status.failed:
        print(f"  stays: partition {cell.partition!r}, {cell.key!r}, field {cell.field!r}: {cell.reason}")
    return 0 if not status.done or status.state == "SUCCEEDED" else 2


def uncordon(arguments: argparse.Namespace) -> int:
    """Let a unit take samples again."""
    from transfer_queue import _drain

    _session.open_session(_conf(arguments), "attach")
    _drain.uncordon(arguments.unit)
    print(f"unit {arguments.unit} takes samples")
    return 0


def _on_disk(unit: dict[str, Any]) -> str:
    limit = f" of {unit['disk_limit_bytes']:,}" if unit["disk_limit_bytes"] else ""
    return (
        f"  {'':<10} {'':<8} {unit['disk_used_bytes']:>16,}{limit} bytes on disk, {unit['disk_cells']} cells in "
        f"{unit['disk_physical_bytes']:,} bytes of files; so far {unit['spilled_bytes']:,} spilled, "
        f"{unit['promoted_bytes']:,} promoted, {unit['compacted_bytes']:,} compacted, "
        f"{unit['fallback_cells']} cells not taken"
    )


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    arguments = _options().parse_args(argv)
    if arguments.command == "serve":
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        commands = {"serve": serve, "status": status, "units": units, "drain": drain, "uncordon": uncordon}
        return commands[arguments.command](arguments)
    except (TransferQueueError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

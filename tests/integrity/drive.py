"""Drives the machine at random, and counts. `python -m tests.integrity.drive 1000000` is the full count."""

import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.integrity.machine import SLOTS_PER_ROW, Machine

PHASE = 400  # operations between two moments at which the machine is idle and must be whole
OPERATIONS = ("admit", "share", "grow", "cache", "finish", "abort", "evict", "check")
FAULTS = ("free", "double", "swap")


@dataclass
class Tally:
    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    violations: int = 0
    healthy_checks: int = 0

    def __str__(self) -> str:
        done = ", ".join(f"{name} {count}" for name, count in sorted(self.operations.items()))
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        return (
            f"{sum(self.operations.values())} operations ({done}); {sum(self.faults.values())} faults ({faults}); "
            f"{self.violations} violations found, all of them true, none missed; "
            f"{self.healthy_checks} checks without a fault before them, no alarm"
        )


def drive(operations: int, seed: int, *, page_size: int, fault_rate: float, machine: Machine | None = None) -> Tally:
    """Every other phase is free of faults. The machine raises where the tags and the truth differ."""
    dice, tally = random.Random(seed), Tally()
    machine = machine or Machine(page_size)
    while sum(tally.operations.values()) < operations:
        faults = fault_rate if sum(tally.operations.values()) // PHASE % 2 else 0.0
        for _ in range(PHASE):
            if dice.random() < faults:
                _fault(machine, dice, tally)
            else:
                _operate(machine, dice, tally)
        machine.idle()
    tally.violations = machine.violations
    return tally


def _operate(machine: Machine, dice: random.Random, tally: Tally) -> None:
    name = dice.choices(OPERATIONS, weights=(3, 3, 6, 3, 2, 1, 2, 8))[0]
    row = dice.choice(sorted(machine.requests)) if machine.requests else None
    node = dice.choice(machine.nodes) if machine.nodes else None
    tokens = dice.randint(1, SLOTS_PER_ROW // 2)
    done = False
    if name == "admit":
        done = machine.admit(tokens)
    elif name == "share" and node:
        done = machine.admit(tokens, node, dice.randint(1, len(node.entries)))
    elif name == "evict" and node:
        done = machine.evict(node)
    elif name == "check":
        tally.healthy_checks += not machine.faulty
        machine.recover(machine.check())
        done = True
    elif row is not None:
        done = _on_request(machine, name, row, tokens)
    tally.operations[name] += done


def _on_request(machine: Machine, name: str, row: int, tokens: int) -> bool:
    if name == "grow":
        return machine.grow(row, 1 + tokens % 3)
    if name == "cache":
        return machine.cache(row)
    return machine.finish(row, keep=name == "finish") if name in ("finish", "abort") else False


def _fault(machine: Machine, dice: random.Random, tally: Tally) -> None:
    used = machine.used_pages()
    if not used or not machine.requests:
        return
    name = dice.choice(FAULTS)
    request = machine.requests[dice.choice(sorted(machine.requests))]
    if name == "free":
        machine.fault_free(dice.choice(used))
    elif name == "double":
        machine.fault_double(dice.choice(used))
    else:
        machine.fault_swap(request.row, dice.randrange(len(request.entries)), dice.randint(1, machine.num_pages))
    tally.faults[name] += 1


def main() -> None:
    total, started = int(sys.argv[1]), time.perf_counter()
    for page_size in (1, 4):
        tally = drive(total // 2, seed=page_size, page_size=page_size, fault_rate=0.05)
        sys.stdout.write(f"page size {page_size}: {tally}\n")
    sys.stdout.write(f"{time.perf_counter() - started:.0f} s\n")


if __name__ == "__main__":
    main()

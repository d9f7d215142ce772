# SPDX-License-Identifier: Apache-2.0
"""Reads the functions of an x86-64 object file and their loops from objdump -d (GNU's or LLVM's, AT&T syntax)."""
import re
import shutil
import subprocess
from typing import NamedTuple

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+([a-z{].*?)\s*(?:#.*)?$")
# "jne 1a2b <f+0x10>" of GNU, "jne 0x1a2b <f+0x10>" of LLVM; a jump may have one of the prefixes.
JUMP = re.compile(r"^(?:notrack |bnd )?(j\w+)(?:,p[nt])?\s+(?:0x)?([0-9a-f]+)\b")
ENDS = re.compile(r"^(?:notrack |bnd |repz? )?(?:jmpq?|ret[lq]?|hlt|ud2)\b")

PADDING = re.compile(r"^(?:data16 |cs )*(?:nop|xchg +%ax, *%ax)|^int3")


class Instruction(NamedTuple):
    address: int
    text: str


class Loop:
    """A natural loop. Blocks are named by the address of their first instruction."""

    def __init__(self, head, blocks):
        self.head = head
        self.blocks = blocks
        self.parent = None  # the smallest loop around it
        self.own = []  # its instructions, without those of loops inside it


class Function:
    def __init__(self, name, instructions):
        self.name = name
        self.instructions = instructions
        self.loops = loops_of(instructions)


def find_objdump():
    """Returns the path of a disassembler, or None."""
    return next(filter(None, map(shutil.which, ("objdump", "llvm-objdump", "llvm-objdump-14"))), None)


def functions_of(path, objdump):
    command = [objdump, "-d", "-C", "--no-show-raw-insn", path]
    return parse(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def parse(text):
    """Parses the output of objdump into a list of Functions."""
    found = []
    for line in text.splitlines():
        if match := FUNCTION.match(line):
            found.append((match[1], []))
        elif (match := INSTRUCTION.match(line)) and found:
            found[-1][1].append(Instruction(int(match[1], 16), match[2]))
    return [Function(name, instructions) for name, instructions in found if instructions]


def target_of(instruction):
    """Returns the target of a direct jump, or None."""
    match = JUMP.match(instruction.text)
    return int(match[2], 16) if match else None


def blocks_of(instructions):
    """Returns the basic blocks, {first address: instructions}, and the successors of each block."""
    addresses = {i.address for i in instructions}
    starts = {instructions[0].address}
    for this, following in zip(instructions, instructions[1:]):
        if target_of(this) is not None or ENDS.match(this.text):
            starts.add(following.address)
        if target_of(this) in addresses:
            starts.add(target_of(this))
    blocks, head = {}, None
    for instruction in instructions:
        if instruction.address in starts:
            head = instruction.address
            blocks[head] = []
        blocks[head].append(instruction)
    order = list(blocks)
    successors = {}
    for head, following in zip(order, [*order[1:], None]):
        last = blocks[head][-1]
        after = {target_of(last)} & set(blocks)
        if following is not None and not ENDS.match(last.text):
            after.add(following)
        successors[head] = after
    return blocks, successors


def reverse_postorder(entry, successors):
    order, seen, stack = [], {entry}, [(entry, iter(sorted(successors[entry])))]
    while stack:
        block, rest = stack[-1]
        following = next((s for s in rest if s not in seen), None)
        if following is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(sorted(successors[following]))))
    return order[::-1]


def dominators_of(entry, successors):
    """Returns the dominators of each reachable block: the blocks that every path to it passes."""
    order = reverse_postorder(entry, successors)
    predecessors = {block: [] for block in order}
    for block in order:
        for following in successors[block]:
            predecessors[following].append(block)
    dominators = {block: set(order) for block in order}
    dominators[entry] = {entry}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            new = set.intersection(*(dominators[p] for p in predecessors[block])) | {block}
            if new != dominators[block]:
                dominators[block], changed = new, True
    return dominators, predecessors


def loops_of(instructions):
    """Returns all natural loops, inner ones first. Blocks without predecessors count as entries: if they are not
    padding, a switch's table leads to them."""
    blocks, successors = blocks_of(instructions)
    entries = {block for block in set(blocks).difference(*successors.values())
               if not all(PADDING.match(i.text) for i in blocks[block])} | {instructions[0].address}
    dominators, predecessors = dominators_of(None, {None: entries, **successors})
    bodies = {}
    for block, before in dominators.items():
        for head in successors.get(block, set()) & before:  # a back edge
            body, rest = bodies.setdefault(head, {head}), [block]
            while rest:
                inside = rest.pop()
                if inside not in body:
                    body.add(inside)
                    rest += predecessors[inside]
    loops = sorted((Loop(head, body) for head, body in bodies.items()), key=lambda loop: len(loop.blocks))
    for index, loop in enumerate(loops):
        loop.parent = next((l for l in loops[index + 1:] if loop.head in l.blocks and l is not loop), None)
        inner = set().union(*(l.blocks for l in loops[:index] if l.head in loop.blocks))
        loop.own = [i for block in sorted(loop.blocks - inner) for i in blocks[block]]
    return loops

# SPDX-License-Identifier: Apache-2.0
"""A server's loop over a pool of pages, and the call on keys in one piece that each result must equal bit for bit.

Sequences join with a prompt, share full pages with others, fork, are decoded with a guess of several tokens of which
some are taken back, lose the pages before their window, and leave. A page that is free holds NaN, infinity or huge
numbers, and entries of a table that no length reaches hold anything. test_server_loop.py runs some steps;

    python python/tests/server_loop.py --steps 10000 [--device cuda]

runs as many as are asked for, over pages of 1, 3, 16 and 784 keys, with and without a window, in fp32 and bf16, on CUDA
in bf16 and fp16. The call on keys in one piece is attention without a cache on the CPU; on CUDA, where that is another
kernel with other bits, it is a call on a cache of one slot."""
import argparse
import collections
import itertools
import random
import time

import torch

import torch_reference as reference
from tessera import flash_attn, flash_attn_3

HEADS, HEADS_K, DIM = 4, 2, 16
LONGEST, PROMPT, SEQUENCES, GUESS = 120, 40, 6, 4


class Sequence:
    """A sequence: its keys and values in one piece, and its pages. Entries of pages before the window are None."""

    def __init__(self, dtype, device):
        self.k = self.v = torch.empty(0, HEADS_K, DIM, dtype=dtype, device=device)
        self.pages = []

    def __len__(self):
        return len(self.k)


class Server:
    def __init__(self, seed, page, window, dtype=torch.float32, device="cpu"):
        self.draw, self.rows = random.Random(seed), torch.Generator().manual_seed(seed)
        self.page, self.window, self.dtype, self.device = page, window, dtype, device
        self.junk = (float("nan"), float("inf"), torch.finfo(dtype).max)
        count = (SEQUENCES + 2) * (LONGEST + PROMPT + GUESS) // page + 2 * SEQUENCES
        # Two layers in a page, K and V side by side.
        layers = torch.empty(count, page, 2, HEADS_K, 2 * DIM, dtype=dtype, device=device)
        self.k_cache, self.v_cache = layers[:, :, 1, :, :DIM], layers[:, :, 1, :, DIM:]
        self.free, self.users = list(range(count)), collections.Counter()
        for number in self.free:
            self._spoil(number)
        self.sequences, self.seen = [], collections.Counter()

    def _random(self, *shape):
        return torch.randn(shape, generator=self.rows).to(self.device, self.dtype)

    def _integers(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _spoil(self, number):
        self.k_cache[number] = self.draw.choice(self.junk)
        self.v_cache[number] = self.draw.choice(self.junk)

    def _take(self):
        number = self.free.pop(self.draw.randrange(len(self.free)))
        self.users[number] = 1
        return number

    def _give_back(self, number):
        self.users[number] -= 1
        if self.users[number] == 0:
            self._spoil(number)
            self.free.append(number)

    # --- What happens between two steps

    def join(self):
        """A new sequence, perhaps on the full pages that another one begins with. Returns the rows of its prompt."""
        sequence = Sequence(self.dtype, self.device)
        other = self.draw.choice(self.sequences) if self.sequences and self.draw.random() < 0.4 else None
        if other is not None and None not in other.pages:
            full = self.draw.randint(0, len(other) // self.page)
            self._share(sequence, other, full)
            self.seen["shared pages"] += full
        self.sequences.append(sequence)
        self.seen["joins"] += 1
        return sequence, self.draw.randint(1, PROMPT)

    def _share(self, sequence, other, full):
        """The first `full` pages of the other one, and their rows."""
        sequence.pages = other.pages[:full]
        for number in sequence.pages:
            self.users[number] += number is not None
        sequence.k, sequence.v = other.k[:full * self.page], other.v[:full * self.page]

    def fork(self):
        """A copy of a sequence: full pages are shared, a page that is begun is copied."""
        other, sequence = self.draw.choice(self.sequences), Sequence(self.dtype, self.device)
        self._share(sequence, other, len(other) // self.page)
        if len(other) % self.page:
            number = self._take()
            for cache in (self.k_cache, self.v_cache):
                cache[number] = cache[other.pages[len(other) // self.page]]
            sequence.pages.append(number)
            sequence.k, sequence.v = other.k, other.v
        self.sequences.append(sequence)
        self.seen["forks"] += 1

    def leave(self, sequence):
        self.sequences.remove(sequence)
        for number in sequence.pages:
            if number is not None:
                self._give_back(number)
        self.seen["leaves"] += 1

    def _evict(self, sequence):
        """Gives back the pages that no later query sees."""
        if self.window is None:
            return
        for place in range(max(len(sequence) - self.window, 0) // self.page):
            if sequence.pages[place] is not None:
                self._give_back(sequence.pages[place])
                sequence.pages[place] = None
                self.seen["evictions"] += 1

    # --- One step

    def step(self):
        """All sequences at once, in any order, beside rows of nobody. Asserts the bits of every result."""
        if self.sequences and (len(self.sequences) == SEQUENCES or self.draw.random() < 0.05):
            self.leave(self.draw.choice(self.sequences))
        if len(self.sequences) < SEQUENCES and self.sequences and self.draw.random() < 0.08:
            self.fork()
        prompts = dict([self.join()]) if len(self.sequences) < SEQUENCES and self.draw.random() < 0.35 else {}
        if not self.sequences:
            prompts = dict([self.join()])
        batch = list(self.sequences)
        self.draw.shuffle(batch)
        same = not prompts and self.draw.random() < 0.5  # as many new rows for each: the call of version 2.8
        guess = self.draw.randint(1, GUESS)
        new = [prompts.get(m, guess if same else self.draw.randint(1, GUESS)) for m in batch]
        for sequence, rows in zip(batch, new):
            while len(sequence.pages) * self.page < len(sequence) + rows:
                sequence.pages.append(self._take())
        nobody = self.draw.randint(0, 2)
        lengths = self._integers([len(m) for m in batch] + [-guess if same else 0] * nobody)
        table = self._table(batch, nobody)
        q, k, v = ([self._random(rows, heads, DIM) for rows in new] for heads in (HEADS, HEADS_K, HEADS_K))
        out, lse = (self._dense if same else self._ragged)(q, k, v, lengths, table, nobody)
        for b, sequence in enumerate(batch):
            self._check(sequence, q[b], k[b], v[b], out[b], lse[b])
            kept = new[b] if sequence in prompts else self.draw.randint(0, new[b])
            self.seen["tokens"] += kept
            self.seen["taken back"] += new[b] - kept
            sequence.k, sequence.v = torch.cat((sequence.k, k[b][:kept])), torch.cat((sequence.v, v[b][:kept]))
            self._evict(sequence)
        for sequence in batch:
            if len(sequence) > LONGEST:
                self.leave(sequence)
        self.seen["steps"] += 1

    def _table(self, batch, nobody):
        width = max(len(m.pages) for m in batch) + self.draw.randint(0, 2)
        junk = (-1, 10**6, 0, -2**31)
        rows = [[self.draw.choice(junk) if number is None else number for number in m.pages] for m in batch]
        rows += [[]] * nobody
        return self._integers([row + [self.draw.choice(junk) for _ in range(width - len(row))] for row in rows])

    def _scores(self):
        return dict(causal=True, window_size=(-1, -1) if self.window is None else (self.window, 0))

    def _dense(self, q, k, v, lengths, table, nobody):
        q, k, v = (torch.stack(rows + [self._random(*rows[0].shape)] * nobody) for rows in (q, k, v))
        out, lse = flash_attn.flash_attn_with_kvcache(q, self.k_cache, self.v_cache, k, v, cache_seqlens=lengths,
                                                      block_table=table, return_softmax_lse=True, **self._scores())
        real = len(q) - nobody
        assert lse[real:].eq(float("inf")).all() and out[real:].eq(0).all()
        self.seen["calls of 2.8"] += 1
        return out[:real], lse[:real]

    def _ragged(self, q, k, v, lengths, table, nobody):
        counts = [0] + [len(rows) for rows in q] + [0] * nobody
        offsets = self._integers(list(itertools.accumulate(counts)))
        behind = self.draw.randint(0, 3)  # rows past the last offset
        flat = [torch.cat(rows + [rows[0].new_full((behind, *rows[0].shape[1:]), float("nan"))]) for rows in (q, k, v)]
        out, lse = flash_attn_3.flash_attn_with_kvcache(
            flat[0], self.k_cache, self.v_cache, flat[1], flat[2], cache_seqlens=lengths, page_table=table,
            cu_seqlens_q=offsets, cu_seqlens_k_new=offsets, max_seqlen_q=max(map(len, q)), return_softmax_lse=True,
            **self._scores())
        total = sum(counts)
        assert out[total:].eq(0).all() and lse[:, total:].eq(float("-inf")).all()
        sizes = [len(rows) for rows in q]
        self.seen["calls of 3"] += 1
        return out[:total].split(sizes), lse[:, :total].split(sizes, 1)

    def _check(self, sequence, q, k, v, out, lse):
        """The bits of the same rows in a call on the keys in one piece; now and then fp64 too."""
        k, v = torch.cat((sequence.k, k)), torch.cat((sequence.v, v))
        whole, scores = (q[None], k[None], v[None]), self._scores()
        if self.device == "cpu":
            want, want_lse = flash_attn_3.flash_attn_func(*whole, return_attn_probs=True, **scores)
        else:
            want, want_lse = flash_attn_3.flash_attn_with_kvcache(*whole, cache_seqlens=len(k), return_softmax_lse=True,
                                                                  **scores)
        assert torch.equal(out, want[0]), f"O of {len(q)} queries on {len(k)} keys, {dict(self.seen)}"
        assert torch.equal(lse, want_lse[0]), f"LSE of {len(q)} queries on {len(k)} keys, {dict(self.seen)}"
        self.seen["results"] += 1
        if self.draw.random() < 0.02:
            left = None if self.window is None else (self.window, 0)
            o64, lse64 = reference.attention(*(t.cpu() for t in whole), causal="bottom-right", window=left)
            limits = {torch.float32: 3e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
            reference.expect_close(out.cpu(), o64[0], limits[self.dtype], "o")
            reference.expect_lse(lse.cpu(), lse64[0])
            self.seen["results beside fp64"] += 1


PAGES = (16, 3, 1, 784)


def kinds(device):
    dtypes = (torch.bfloat16, torch.float16) if device == "cuda" else (torch.float32, torch.bfloat16)
    return [(page, window, dtype, device) for page in PAGES for window in (None, 21) for dtype in dtypes]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    total, begun = collections.Counter(), time.monotonic()
    of_device = kinds(options.device)
    for number, kind in enumerate(of_device):
        server = Server(options.seed + number, *kind)
        for _ in range(-(-options.steps // len(of_device))):
            server.step()
        total.update(server.seen)
    print(f"{time.monotonic() - begun:.0f} s; " + ", ".join(f"{number:,} {name}" for name, number in total.items()))


if __name__ == "__main__":
    main()

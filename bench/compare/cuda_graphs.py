# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of a function of PyTorch tensors, and their times side by side."""
import statistics

import torch


def captured(function):
    """A graph of one call of `function`, and what its replays write: what that call returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def times_of(graphs, repeat):
    """The median milliseconds of a replay of each graph, by name. The graphs take turns."""
    times = {name: [] for name in graphs}
    warm_up = 10
    for turn in range(warm_up + repeat):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= warm_up:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(each) for name, each in times.items()}

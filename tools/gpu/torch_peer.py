"""What PyTorch's library kernels reach on the same GPU, for the shapes that the benchmark measures: `torch_peer.py`.

Linear layers of an 8 B Llama alone (no norms, no attention, no sampling) as one CUDA graph, and decode attention over 32 768 columns.
"""

import json

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]


def seconds(run, count=10):
    run()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(3):
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / count)
    return best


def graphed(run):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


torch.manual_seed(0)
make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02
layers = [[make(*shape) for shape in SHAPES] for _ in range(32)]
head = make(128256, 4096)
weight_bytes = sum(w.numel() * 2 for layer in layers for w in layer) + head.numel() * 2
report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "linear": [], "attention": []}
with torch.no_grad():
    for rows in (1, 8, 64, 4096):
        inputs = {width: make(rows, width) for width in (4096, 14336)}
        last = make(min(rows, 64), 4096)

        def run():
            for layer in layers:
                for w in layer:
                    F.linear(inputs[w.shape[1]], w)
            F.linear(last, head)

        time = seconds(graphed(run))
        flop = 2 * rows * sum(w.numel() for layer in layers for w in layer)
        report["linear"].append(dict(rows=rows, us=time * 1e6, weights_gb_s=weight_bytes / time / 1e9, tflop_s=flop / time / 1e12))
    for rows in (1, 32):
        copies = 4 if rows == 1 else 1
        kv = [(make(rows, 8, 32768, 128), make(rows, 8, 32768, 128)) for _ in range(copies)]
        q = make(rows, 32, 1, 128)

        def attend():
            for k, v in kv:
                with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION], set_priority=True):
                    F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        time = seconds(attend) / copies
        size = rows * 8 * 32768 * 128 * 4
        report["attention"].append(dict(rows=rows, us=time * 1e6, gb_s=size / time / 1e9))
print(json.dumps(report, indent=1))

"""Every tensor format with its decoded values: GGUF by the `gguf` package, MLX affine by `mlx`."""

import gguf
import mlx.core as mx
import numpy as np
from safetensors.numpy import save_file

from common import FIXTURES, write_json

OUT = FIXTURES / "weights"
ROWS, COLS = 3, 256


def ggml() -> None:
    random = np.random.default_rng(1)
    types = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(OUT / "formats.gguf", "llama")
    decoded = {}
    for kind in [types.F32, types.F16, types.BF16, types.Q4_0, types.Q4_1, types.Q5_0, types.Q5_1, types.Q8_0,
                 types.Q4_K, types.Q5_K, types.Q6_K, types.MXFP4]:
        values = random.normal(0, 1, (ROWS, COLS)).astype(np.float32)
        try:
            data = gguf.quantize(values, kind)
        except NotImplementedError:
            # The package decodes K-quants but does not encode them: any bytes with finite scales are a valid block.
            block, size = gguf.GGML_QUANT_SIZES[kind]
            data = random.integers(0, 256, (ROWS, COLS // block, size), dtype=np.uint8)
            scales = [208] if kind == types.Q6_K else [0, 2]
            for at in scales:
                half = random.normal(0, 0.01, (ROWS, COLS // block, 1)).astype(np.float16)
                data[:, :, at:at + 2] = half.view(np.uint8)
            data = data.reshape(ROWS, -1)
        decoded[kind.name] = np.ascontiguousarray(gguf.dequantize(data, kind)).reshape(ROWS, COLS).astype(np.float32)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(decoded, OUT / "formats.safetensors")


def affine() -> None:
    mx.random.seed(1)
    stored, decoded = {}, {}
    for bits in [2, 3, 4, 5, 6, 8]:
        for group in [32, 64, 128]:
            for dtype in [mx.float32, mx.bfloat16]:
                name = f"b{bits}g{group}{'f32' if dtype == mx.float32 else 'bf16'}"
                codes, scales, biases = mx.quantize(mx.random.normal((ROWS, COLS)).astype(dtype), group, bits)
                stored[f"{name}.weight"], stored[f"{name}.scales"], stored[f"{name}.biases"] = codes, scales, biases
                # In f32, since decoding in bf16 would round twice.
                scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
                decoded[name] = np.array(mx.dequantize(codes, scales, biases, group, bits))
    (OUT / "mlx").mkdir(exist_ok=True)
    mx.save_safetensors(str(OUT / "mlx" / "model.safetensors"), stored, {"format": "mlx"})
    write_json(OUT / "mlx" / "config.json", {"model_type": "llama"})
    save_file(decoded, OUT / "mlx.safetensors")


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    ggml()
    affine()

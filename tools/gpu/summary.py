"""Prints the reports of `bench` as short tables: `summary.py REPORT.json …`."""

import json
import sys

for path in sys.argv[1:]:
    report = json.load(open(path))
    print(f"== {path}: {report['device']}, reads {report['read_gb_s']:.0f} GB/s, multiplies {report['mma_tflop_s']:.0f} TFLOP/s")
    for line in report.get("attention", []):
        print(f"attention of {line['rows']:>3} rows: {line['us']:8.1f} us, {line['share_of_read']:.1%} of the read limit")
    for line in report.get("decode", []):
        print(f"decode of {line['rows']:>3} rows: {line['step_us']:8.0f} us, {line['tok_s']:8.0f} tok/s, {line['share_of_read']:.1%} of the read limit over weights")
        for kernel in line.get("kernels", []):
            print(f"    {kernel['kernel']:<24} {kernel['count']:>4} x {kernel['us'] / kernel['count']:8.1f} us = {kernel['us']:8.0f} us")
    if prompt := report.get("prompt"):
        print(f"prompt of {prompt['tokens']}: {prompt['ms']:.1f} ms, {prompt['weights_tflop_s']:.0f} TFLOP/s over weights")
        for kernel in prompt.get("kernels", []):
            print(f"    {kernel['kernel']:<24} {kernel['count']:>4} = {kernel['us']:10.0f} us")

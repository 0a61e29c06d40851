import sys, torch
sys.path.insert(0, "tests/formats")
import lpq
from nasty import values, views, normal, bytes_of
print(torch.__version__, torch.cuda.get_device_name())
Q = ["mxfp8", "mxfp8(dtype=e5m2)"] + [f"nvfp4(block={b}, rht={r}, stochastic={s})" for b in ("1x16","16x16") for r in ("false","true") for s in ("false","true")]
bad = n = 0
for text in Q:
    q = lpq.quantizer(text)
    for dt in (torch.float32, torch.bfloat16, torch.float16):
        for name, x in {**values(dt), **views(dt)}.items():
            a, b = q.quantize(x, seed=5), q.quantize(x.cuda(), seed=5)
            for s, t in ((a.row, b.row), (a.col, b.col)):
                for (k, u), v in zip(s.buffers().items(), t.tensors()):
                    n += 1
                    if not torch.equal(bytes_of(u), bytes_of(v.cpu())):
                        bad += 1
                        print("DIFF", text, dt, name, k, (bytes_of(u) != bytes_of(v.cpu())).sum().item(), u.flatten()[:4], v.flatten()[:4])
                for f in ("decode", "decode_rotated"):
                    d, e = getattr(s, f)(), getattr(t, f)().cpu()
                    n += 1
                    if not (torch.equal(d.isnan(), e.isnan()) and torch.equal(d.nan_to_num(1.5), e.nan_to_num(1.5))):
                        bad += 1; print("DIFF decode", text, dt, name, f, (d - e).abs().max())
print("compared", n, "bad", bad)
x = normal(512, 768).cuda().bfloat16()
seed = torch.tensor(3, device="cuda")
for text in Q:
    q = lpq.quantizer(text); q.quantize(x, seed=seed)
    torch.cuda.set_sync_debug_mode("error")
    t = q.quantize(x, seed=seed); t.row.decode(); t.col.decode(); t.col.decode_rotated()
    torch.cuda.set_sync_debug_mode("default")
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        t = q.quantize(x, seed=seed)
    g.replay(); torch.cuda.synchronize()
    w = q.quantize(x, seed=seed)
    assert torch.equal(t.row.data.view(torch.uint8), w.row.data.view(torch.uint8)), text
print("no sync, graphs fine")

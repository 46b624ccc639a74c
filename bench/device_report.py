"""From the lines that the parts left to the summary: what each way of decoding reaches of what the memory allows.

Pure: lines in, one value out.
"""

from collections.abc import Sequence
from typing import Any

Line = dict[str, Any]


def roofline(weights: float, kv_token: float, rows: int, context: float, bandwidth: float) -> float:
    """Tokens per second if a step took only as long as its reading: all ``weights`` bytes once, and ``kv_token`` bytes
    for each of the ``context`` tokens of each row, at ``bandwidth`` bytes per second."""
    return rows * bandwidth / (weights + rows * context * kv_token)


def summarise(lines: Sequence[Line]) -> Line:
    """``decode``: shape -> rows -> system -> tokens per second, and its share of the roofline at its own context;
    ``over``: promptmill's speed over each other's. What was not measured is absent."""
    copies = [line["bytes_s"] for line in lines if line["kind"] == "copy"]
    weights = {line["shape"]: line for line in lines if line["kind"] == "model"}
    decode: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines:
        if line["kind"] != "decode":
            continue
        found = {"tok_s": line["tok_s"], "step_ms": line["step_ms"], "context": line["context"]}
        model = weights.get(line["shape"])
        if copies and model is not None:
            most = roofline(model["weight_bytes"], model["kv_token_bytes"], line["rows"], line["context"], copies[-1])
            found |= {"roofline_tok_s": round(most, 1), "of_roofline": round(line["tok_s"] / most, 3)}
        decode.setdefault(line["shape"], {}).setdefault(str(line["rows"]), {})[line["system"]] = found
    for by_rows in decode.values():
        for systems in by_rows.values():
            own = systems.get("promptmill")
            others = {name: found for name, found in systems.items() if name != "promptmill"}
            if own is not None and others:
                systems["over"] = {name: round(own["tok_s"] / found["tok_s"], 2) for name, found in others.items() if found["tok_s"]}
    use: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line["kind"] == "use":
            use.setdefault(line["shape"], {})[str(line["rows"])] = {key: line[key] for key in ("percent", "samples", "sampler", "tok_s")}
    parts = [line for line in lines if line["kind"] == "part"]
    return {
        "ok": bool(parts) and all(part["ok"] for part in parts),
        "machine": next((line for line in lines if line["kind"] == "machine"), None),
        "copy_gb_s": round(copies[-1] / 1e9, 1) if copies else None,
        "tests": next((line for line in reversed(lines) if line["kind"] == "tests"), None),
        "decode": decode,
        "utilisation": use,
        "parts": parts,
    }


def sentence(line: Line) -> str:
    """One line of progress for people."""
    kind = line["kind"]
    if kind == "decode":
        return f"{line['shape']} {line['system']} {line['rows']} rows: {line['tok_s']} tok/s, a step {line['step_ms']} ms"
    if kind == "use":
        percent = "not measured" if line["percent"] is None else f"{line['percent']} %"
        return f"{line['shape']} {line['rows']} rows kept full: utilisation {percent} ({line['samples']} samples), {line['tok_s']} tok/s"
    if kind == "copy":
        return f"copies: {line['bytes_s'] / 1e9:.1f} GB/s read and written"
    if kind == "tests":
        return f"tests: {line['passed']} passed, {len(line['failed'])} failed, {line['skipped']} skipped"
    if kind == "part":
        return f"{line['name']}: {'ok' if line['ok'] else 'FAILED, ' + line['reason']} after {line['seconds']} s"
    return " ".join(f"{key}={value}" for key, value in line.items())


def table(summary: Line) -> str:
    """The decode figures, a row of text for each shape and number of rows."""
    out = [f"{'shape':<6}{'rows':>5}  {'system':<20}{'tok/s':>10}{'step ms':>9}{'of roofline':>13}{'promptmill over':>17}"]
    for shape, by_rows in summary["decode"].items():
        for rows, systems in by_rows.items():
            for name, found in systems.items():
                if name == "over":
                    continue
                over = systems.get("over", {}).get(name, "")
                out.append(
                    f"{shape:<6}{rows:>5}  {name:<20}{found['tok_s']:>10}{found['step_ms']:>9}{found.get('of_roofline', ''):>13}{over:>17}"
                )
    return "\n".join(out)

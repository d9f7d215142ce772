#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the parameters that `tessera roofline --model` counts with those of the models of transformers.

    tools/compare_models.py build/tessera                    # all types: a line each, and the sums
    tools/compare_models.py build/tessera llama mixtral      # these
    tools/compare_models.py build/tessera --write            # writes toolkit/measure/compared_models.cc

For each model_type of transformers the default config.json goes to the command, and transformers makes the model of it
on the device "meta", which has no memory: with a language model's head where there is such a class. A type is in the
list if both numbers are within 5 %. A model that takes over a minute, or that transformers can't make, is left out.
"""
import argparse
import contextlib
import json
import pathlib
import re
import signal
import subprocess
import tempfile
import warnings

LIMIT = 0.05
MOST_SECONDS = 60
SOURCE = pathlib.Path(__file__).resolve().parent.parent / "toolkit/measure/compared_models.cc"


def counted_by_tessera(command, config):
    """The parameters by the command, or the reason why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(config)
        ran = subprocess.run([command, "roofline", "--model", folder, "--device", "h200", "--len", "1k", "--json"],
                             capture_output=True, text=True)
    if ran.returncode != 0:
        return None, ran.stderr.split("config.json: ", 1)[-1].split("\n")[0]
    return json.loads(ran.stdout)["rows"][0]["parameters"], ""


@contextlib.contextmanager
def at_most(seconds):
    def stop(*_):
        raise TimeoutError(f"over {seconds} s")
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def models_of(config):
    """The classes that make a model of this config, the one with a language model's head first."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMaskedLM

    return [auto for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMaskedLM, AutoModel)
            if type(config) in auto._model_mapping]


def parameters_of(model):
    return sum({id(p): p.numel() for p in model.parameters()}.values())


def made_by_transformers(config):
    """The parameters of the model that transformers makes, or the reason why it makes none."""
    import torch

    why = "no class makes a model of it"
    for auto in models_of(config):
        try:
            with at_most(MOST_SECONDS), torch.device("meta"):
                return parameters_of(auto.from_config(config)), ""
        except Exception as error:  # noqa: BLE001 (any class of any model)
            why = f"{type(error).__name__}: {str(error)[:80]}"
    return None, why


def compared(command, model_type):
    """(parameters by the command, by transformers, remark)."""
    from transformers import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[model_type]()
        text = config.to_json_string(use_diff=False)
    except Exception as error:  # noqa: BLE001
        return None, None, f"no default config: {str(error)[:80]}"
    ours, why = counted_by_tessera(command, text)
    if ours is None:
        return None, None, why
    theirs, why = made_by_transformers(config)
    return ours, theirs, why


def write(model_types):
    text = SOURCE.read_text()
    names = ",\n".join(("" if i == 0 else " " * 42) + f'"{name}"' for i, name in enumerate(sorted(model_types)))
    SOURCE.write_text(re.sub(r"(kCompared\[\] = \{).*?(\};)", lambda m: m[1] + names + m[2], text, flags=re.S))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", help="build/tessera")
    parser.add_argument("types", nargs="*", help="model types; all of transformers by default")
    parser.add_argument("--write", action="store_true", help=f"write {SOURCE.name}")
    options = parser.parse_args()
    if options.write and options.types:
        parser.error("--write goes with all types")

    import transformers
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    within, others, none = [], 0, 0
    for model_type in options.types or sorted(transformers.CONFIG_MAPPING.keys()):
        ours, theirs, why = compared(options.command, model_type)
        if theirs is None:
            none += 1
            print(f"{model_type:36} {why}", flush=True)
            continue
        error = ours / theirs - 1
        print(f"{model_type:36} {ours:16,.0f} {theirs:16,} {100 * error:+7.1f} %", flush=True)
        if abs(error) <= LIMIT:
            within.append(model_type)
        else:
            others += 1
    print(f"transformers {transformers.__version__}: {len(within)} types within {100 * LIMIT:.0f} %, {others} are not, "
          f"{none} were not compared")
    if options.write:
        write(within)


if __name__ == "__main__":
    main()

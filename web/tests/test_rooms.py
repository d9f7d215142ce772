# SPDX-License-Identifier: Apache-2.0
"""Each room by mouse and by keyboard, and its numbers against the command's."""
import math
import struct
import xml.etree.ElementTree as ElementTree

import pytest
from conftest import DIST, choose
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

ROOMS = ("compare", "learn", "tiles", "walk", "paper", "backward", "race", "which", "roofline")


def press(page, *keys):
    ActionChains(page.driver).send_keys(*keys).perform()


def close(got, expected, relative=1e-12):
    if isinstance(expected, str):
        return got == expected
    return math.isclose(got, expected, rel_tol=relative, abs_tol=1e-30)


def test_rooms_by_keyboard_alone(page):
    page.open()
    for index, room in enumerate(ROOMS):
        page.run("document.querySelectorAll('nav a')[arguments[0]].focus()", index)
        press(page, Keys.ENTER)
        page.until("return location.hash.startsWith('#' + arguments[0])", room)
        page.until("return document.activeElement.id === 'room-title'")  # once the event of the new hash was heard
        assert page.run("return document.querySelector('nav [aria-current]').hash") == f"#{room}"
        press(page, Keys.TAB)  # from the title to the first control of the room
        assert page.run("return document.activeElement.closest('#room-form, #room-picture') !== null")


def test_first_tab_stop_skips_to_the_content(page):
    page.open()
    press(page, Keys.TAB)
    assert page.run("return document.activeElement.className") == "skip"
    press(page, Keys.ENTER)
    page.until("return document.activeElement.id === 'room-title'")


def test_compare_ends_with_the_commands_digits_on_both_sides(page, command):
    page.open("compare?step=0")
    assert set(page.values().values()) == {0}
    press(page, Keys.END)
    page.until("return document.querySelector('.now').textContent.includes('same digits')")
    got = page.values()
    assert got["moved.standard"] > 1.5 * got["moved.fa2"]
    left, right = page.run("return document.querySelector('.now').textContent.match(/\\([^)]*\\)/g).slice(0, 2)")
    assert left == right
    documents = [command("walk", DIST / "sample.safetensors", "--layout", "bhsd", "--causal", "none", "--schedule", schedule,
                         "--tile", "32,32", "--row", 100) for schedule in ("standard", "fa2")]
    for document in documents:
        first = [round(value, 4) for value in walk_steps(document)[-1]["estimate"][:1]]
        assert f"({first[0]}".replace("-", "−") in left


def test_compare_opens_moving_and_stops_where_the_system_asks_for_it(page):
    page.open()
    page.until("return document.querySelector('.now').textContent.includes('same digits')")
    page.until("return document.querySelector('.play').textContent === 'Play'")
    if page.browser.set_less_motion():
        page.open()
        shown = page.values()
        assert 0 < shown["moved.fa2"] < shown["moved.standard"]
        page.driver.execute_async_script("setTimeout(arguments[0], 400)")
        assert page.values() == shown


def test_rooms_open_on_something_to_see_and_lead_on(page):
    """Each room has its question as title, names its lessons, and leads to the next one."""
    for room, following in zip(ROOMS, (*ROOMS[1:], None)):
        page.open(room)
        assert page.run("return document.querySelector('h1').textContent").endswith("?")
        assert page.run("return document.title").startswith(page.run("return document.querySelector('h1').textContent"))
        assert room == "learn" or page.run("return document.querySelectorAll('#room-next a[href^=\"#learn?lesson=\"]').length") >= 1
        next_room = page.run("return document.querySelector('#room-next .next a')?.hash ?? null")
        assert next_room == (following and f"#{following}")
    page.open("walk")
    assert page.values()["m"] is not None
    page.open("race")
    assert page.values()["fa2.flop"] > 0


def test_fields_without_effect_are_hidden(page):
    page.open("walk")
    seen = "return [...document.querySelectorAll('[data-control]')].filter(n => !n.hidden).map(n => n.dataset.control)"
    assert not {"len", "layout"} & set(page.run(seen))
    choose(page, "from", "random")
    assert "len" in page.run(seen) and "layout" not in page.run(seen)


@pytest.mark.parametrize("mask, block", [("none", "128"), ("bottom-right", "128"), ("bottom-right", "64")])
def test_tiles_are_the_plans(page, command, mask, block):
    page.open(f"tiles?causal={mask}&len_q=1000&len_kv=1500&block_q={block}&block_kv={block}")
    got = page.values()
    plan = command("plan", "--len-q", 1000, "--len-kv", 1500, "--heads", 1, "--head-dim", 128, "--dtype", "fp32", "--causal", mask,
                   "--schedule", "fa2", "--backend", "cpu", "--tile", f"{block},{block}", "--device", "xeon-16")
    predicted = plan["chosen"]["predicted"]
    for kind in ("full", "partial", "skipped"):
        assert got[f"tiles.{kind}"] == predicted["tiles"][kind], kind
    assert got["flop"] == predicted["flop"]
    assert got["pairs"] == predicted["exps"]
    drawn = page.run("return document.querySelectorAll('#picture-tiles rect.tile').length")
    assert drawn == sum(predicted["tiles"].values())


def test_tiles_say_what_does_not_fit(page):
    page.open("tiles?block_q=256&block_kv=256&head_dim=256")
    assert "does not fit" in page.run("return document.querySelector('#room-picture').textContent")
    choose(page, "block_q", "64")
    choose(page, "block_kv", "64")
    page.until("return document.querySelector('#room-picture').textContent.includes('— fits')")
    assert "block_q=64" in page.run("return location.hash")


def walk_steps(document):
    return [step for step in document["steps"] if step["tile"] == "skipped" or "estimate" in step or step["step"] == "softmax"]


@pytest.mark.parametrize("schedule", ["fa2", "fa1", "standard"])
def test_walk_has_the_commands_numbers(page, command, schedule):
    document = command("walk", DIST / "sample.safetensors", "--layout", "bhsd", "--causal", "bottom-right", "--schedule", schedule,
                       "--tile", "16,16", "--row", 100)
    steps = walk_steps(document)
    page.open(f"walk?schedule={schedule}&step=0")
    assert page.values()["m"] is None
    for at, step in enumerate(steps, 1):
        press(page, Keys.ARROW_RIGHT)
        page.until("return (new URLSearchParams(location.hash.split('?')[1]).get('step') ?? '6') === arguments[0]", str(at))
        got = page.values()
        for name in ("m", "l", "error"):
            if name in step:
                # Without fused multiply-adds; errors near rounding are themselves rounding.
                near = step[name] if name != "error" else max(step[name], 1e-6)
                assert close(got[name], step[name], 2e-5) or abs(got[name] - step[name]) < 2e-6 * abs(near) + (1e-6 if name == "error" else 0), (name, step)
        if step["tile"] != "skipped":
            assert got["bytes.schedule"] == pytest.approx(step["bytes"]["schedule"], rel=1e-12)
            assert got["bytes.standard"] == pytest.approx(step["bytes"]["standard"], rel=1e-12)
    assert got["error"] < 1e-6  # the last step is exact
    press(page, Keys.HOME)
    page.until("return location.hash.includes('step=0')")
    assert page.values()["m"] is None


def test_walk_by_mouse_forwards_and_backwards(page):
    page.open("walk?step=2")
    before = page.values()
    page.click("[aria-label='Step forward']")
    after = page.values()
    assert after["l"] != before["l"]
    page.click("[aria-label='Step back']")
    assert page.values() == before
    said = page.until("const text = document.getElementById('said').textContent; return text.includes('multiplied') && text")
    assert "O is" in said
    page.open("walk?step=2")  # the state in the URL is the whole state
    assert page.values() == before


def test_walk_asks_before_it_shows(page):
    page.open("walk?ask=1&step=1")
    m = page.values()["m"]
    press(page, Keys.ARROW_RIGHT)
    assert page.until("return document.querySelector('.quiz p').textContent.includes('Will m rise')")
    assert page.values()["m"] == m  # not shown yet
    press(page, Keys.ENTER)  # the first answer has the focus
    assert page.until("return /Right|Not so/.test(document.querySelector('.quiz').textContent)")
    rose = page.values()["m"] > m
    assert page.run("return document.querySelector('.quiz').textContent").startswith("Right" if rose else "Not so")


def write_npy(path, shape, values):
    header = str({"descr": "<f4", "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + struct.pack(f"<{len(values)}f", *values))


def test_walk_takes_files_of_ones_own(page, command, tmp_path):
    shape = (1, 40, 1, 8)
    paths = []
    for index, name in enumerate("qkv"):
        paths.append(tmp_path / f"{name}.npy")
        write_npy(paths[-1], shape, [math.sin(1.3 * i + index) for i in range(40 * 8)])
    document = command("walk", *paths, "--causal", "none", "--schedule", "fa2", "--tile", "16,16", "--row", 0)
    page.open("walk?from=own&causal=none")
    page.driver.find_element("id", "own-files").send_keys("\n".join(map(str, paths)))
    page.until("return document.querySelector('[data-key=m]') !== null")
    press(page, Keys.END)
    assert close(page.values()["l"], walk_steps(document)[-1]["l"], 1e-5)
    before = page.values()["l"]
    write_npy(paths[0], shape, [3 * math.sin(1.1 * i) for i in range(40 * 8)])  # a file of the same name, another content
    page.driver.find_element("id", "own-files").send_keys("\n".join(map(str, paths)))
    page.until("return Number(document.querySelector('[data-key=l]').dataset.value) !== arguments[0]", before)
    press(page, Keys.END)
    assert page.values()["l"] != before


@pytest.mark.parametrize("schedule, mask", [("fa2", "none"), ("fa1", "bottom-right"), ("standard", "none")])
def test_paper_has_the_commands_fractions(page, command, schedule, mask):
    hand = command("walk", "--by-hand", "--backward", "--schedule", schedule, "--causal", mask)
    page.open(f"paper?schedule={schedule}&causal={mask}&ask=0")
    for at, step in enumerate(hand["steps"]):
        page.until("return (new URLSearchParams(location.hash.split('?')[1]).get('step') ?? '0') === arguments[0]", str(at))
        lines = dict(page.run("return [...document.querySelectorAll('.graph .paper dl div')].map(d => [d.firstChild.textContent, d.lastChild.textContent])"))
        plain = {name.replace("−", "-"): text.replace("−", "-") for name, text in lines.items()}
        assert plain["m = max"] == str(step["m"])
        assert plain["rescale = 2^(old m - m)"] == step["rescale"]
        o = next(text for name, text in plain.items() if name.startswith("O ="))
        assert [part.strip() for part in o.split(",")] == step["o"]
        assert [part.strip() for part in lines["l = rescale · old l + Σ p"].split(",")] == [step["l"]]
        press(page, Keys.ARROW_RIGHT)


def test_paper_asks_for_m_l_and_o_and_prints(page, command):
    hand = command("walk", "--by-hand", "--backward")
    page.open("paper?ask=1")
    assert page.run("return document.querySelectorAll('.graph .blank').length") == 5
    page.run("document.getElementById('guess-m').focus()")
    press(page, str(hand["steps"][0]["m"] + 1), Keys.ENTER)
    assert page.until("return document.querySelector('.quiz [role=status]').textContent.startsWith('Not so')")
    page.run("document.getElementById('guess-m').value = ''")
    press(page, str(hand["steps"][0]["m"]), Keys.ENTER)
    page.until("return document.activeElement.id === 'guess-l'")
    press(page, hand["steps"][0]["l"], Keys.ENTER)
    page.until("return document.activeElement.id === 'guess-o'")
    press(page, hand["steps"][0]["o"][0], Keys.ENTER)
    assert page.until("return document.querySelector('.quiz [role=status]').textContent.startsWith('Expected 2 numbers')")
    page.run("document.getElementById('guess-o').value = ''")
    press(page, "(" + ", ".join(hand["steps"][0]["o"]) + ")", Keys.ENTER)
    page.until("return document.querySelectorAll('.graph .blank').length === 0")
    page.browser.set_print()
    assert page.run("return getComputedStyle(document.querySelector('.print-only')).display") == "block"
    assert page.run("return getComputedStyle(document.querySelector('header')).display") == "none"
    assert page.run("return document.querySelectorAll('.print-only .paper').length") == len(hand["steps"])


@pytest.mark.parametrize("device, options", [("h200", ("--causal", "bottom-right")), ("a100", ("--pass", "both")), ("xeon-16", ())])
def test_roofline_has_the_commands_predictions(page, command, device, options):
    state = "&".join(f"{name[2:]}={value}" for name, value in zip(options[::2], options[1::2]))
    page.open(f"roofline?device={device}&len=8192&{state}")
    got = page.values()
    row = command("roofline", "--device", device, "--heads", 16, "--head-dim", 128, "--len", 8192, "--baseline", "standard",
                  *options)["rows"][0]
    for entry in row["schedules"]:
        for name in ("ms", "tflops", "win"):
            key = f"{entry['schedule']}.{name}"
            assert (key in got) == (name in entry), key
            if name in entry:
                assert close(got[key], entry[name]), key
    sheet = command("roofline", "--device", device, "--heads", 16, "--head-dim", 128, "--len", 8192, "--schedule", "fa2", "--worksheet", *options)
    lines = [line["calculation"] for p in sheet["rows"][0]["schedules"][0]["passes"] for line in p["worksheet"]]
    assert page.run("return [...document.querySelectorAll('.worksheet code')].map(n => n.textContent)") == lines


def test_roofline_is_drawn_step_by_step(page):
    page.open("roofline?step=0")
    assert page.run("return document.querySelectorAll('#picture-roofline .roof').length") == 0
    press(page, Keys.ARROW_RIGHT)
    page.until("return document.querySelectorAll('#picture-roofline .roof').length === 1")
    press(page, Keys.END)
    page.until("return document.querySelectorAll('#picture-roofline .curve').length === 4")


def test_race_ends_with_the_commands_counts(page, command):
    page.open("race?len=1024&causal=bottom-right&step=0")
    assert page.values()["fa2.flop"] == 0
    press(page, Keys.END)
    page.until("return Number(document.querySelector('[data-key=\"standard.flop\"]').dataset.value) > 0")
    got = page.values()
    row = command("roofline", "--len", 1024, "--heads", 1, "--head-dim", 128, "--causal", "bottom-right", "--by", "tessera")["rows"][0]
    for entry in row["schedules"]:
        name, expected = entry["schedule"], entry["passes"][0]
        assert got[f"{name}.flop"] == expected["flop"]
        assert got[f"{name}.exps"] == expected["exps"]
    # The papers say: standard moves most beyond the multiprocessor, fa2 least of those that wait.
    assert got["standard.l2"] > got["fa1.l2"] > got["fa2.l2"] == got["fa3.l2"]


def test_backward_counts_are_the_commands(page, command):
    page.open("backward?len=1024&causal=bottom-right&workers=4")
    got = page.values()
    entry = command("roofline", "--len", 1024, "--heads", 1, "--head-dim", 128, "--causal", "bottom-right", "--pass", "backward",
                    "--schedule", "fa2")["rows"][0]["schedules"][0]["passes"][0]
    assert got["flop"] == entry["flop"]
    assert got["exps"] == entry["exps"]
    assert got["clashes"] > 0
    choose(page, "workers", "1")
    page.until("return document.querySelector('[data-key=clashes]').dataset.value === '0'")  # one worker meets nobody


def test_which_reads_names_as_the_command(page, command, tmp_path):
    names = "\n".join(["void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64, 64, 256, 4>>(Flash_fwd_params)",
                       "fmha_cutlassF_f16_aligned_64x64_rf_sm80", "ampere_sgemm_128x64_tn", "nobody_knows_this_kernel"])
    (tmp_path / "names.txt").write_text(names, encoding="utf-8")
    page.open("which")
    page.run("const t = document.getElementById('c-names'); t.value = arguments[0]; t.dispatchEvent(new Event('input', {bubbles: true}));", names)
    page.until("return document.querySelector('#room-picture').textContent.includes('splitkv')")
    found = command("which", tmp_path / "names.txt")["files"][0]
    got = page.values()
    for index, kind in enumerate(found["attention"]):
        assert got[f"attention.{index}.family"] == kind["family"]
        assert got[f"attention.{index}.confidence"] == kind["confidence"]
    assert page.run("return document.querySelector('.now').textContent") == found["paragraph"]
    rest = page.run("return [...document.querySelectorAll('section')].filter(s => s.textContent.startsWith('Not known')).map(s => s.textContent)")
    assert len(rest) == 1 and "ampere_sgemm_128x64_tn" in rest[0] and "splitkv" not in rest[0]


def test_what_is_wrong_is_told_by_the_core(page):
    page.open("walk?row=4000")
    assert page.run("return document.querySelector('[role=alert]').textContent").startswith("--row: expected 0..127, got 4000")


@pytest.mark.parametrize("room, figure", [("tiles", "tiles"), ("walk?step=4", "walk"), ("roofline", "win"), ("race?step=90", "race"), ("backward?step=3", "backward")])
def test_pictures_are_saved(page, downloads, room, figure):
    page.open(room)
    buttons = page.driver.find_elements("css selector", f"#picture-{figure} .save button")
    for kind, button in zip(("svg", "png"), buttons):
        path = downloads / f"{figure}.{kind}"
        path.unlink(missing_ok=True)
        button.click()
        page.until("return 1")
        for _ in range(100):
            if path.exists() and path.stat().st_size > 500:
                break
            page.driver.execute_async_script("setTimeout(arguments[0], 100)")
        content = path.read_bytes()
        if kind == "svg":
            root = ElementTree.fromstring(content)
            assert len(list(root.iter())) > 10 and b"var(" not in content
        else:
            assert content[:8] == b"\x89PNG\r\n\x1a\n"



# SPDX-License-Identifier: Apache-2.0
"""The room "learn": lessons, recaps, exam and kernels, against `tessera learn`."""
import json
import os
import subprocess
import zipfile

from conftest import COMMAND, ROOT, choose
from selenium.webdriver.common.keys import Keys


def test_lessons_are_those_of_the_command(page, tmp_path):
    """A lesson unfolds after its question; its exercise is graded as by `tessera learn`; answers stay in the browser."""
    def learn(*args):
        return json.loads(subprocess.run([COMMAND, "learn", *args, "--json"], capture_output=True, text=True, check=False,
                                         env={**os.environ, "XDG_STATE_HOME": str(tmp_path)}).stdout)
    listed = learn()["lessons"]
    page.open("learn")
    page.run("localStorage.clear()")
    page.open("learn")
    assert page.run("return [...document.querySelectorAll('#room-picture ol a')].map(a => a.textContent)") == [one["title"] for one in listed]
    for one in listed:
        page.open(f"learn?lesson={one['lesson']}")
        assert not page.run("return document.querySelector('.unfold').open")
        assert len(page.run("return document.querySelector('.unfold .lesson').textContent")) > 500
        assert page.run("return document.querySelector('.unfold img').naturalWidth >= 0")
        assert page.run("return document.querySelector('h1').textContent") == f"{one['lesson']}. {one['title']}"
        assert page.run("return [...document.querySelectorAll('[data-exercise]')].map(n => n.dataset.exercise)") == [
            exercise["exercise"] for exercise in one["exercises"]]
    page.open("learn?lesson=7")
    card = "document.querySelector('[data-exercise=\"7a\"]')"
    field = page.driver.find_element("id", "answer-7a")
    grade = f"return {card}.querySelector('.grade').textContent"
    solution = f"return !{card}.querySelector('.solution').hidden"
    for answer in ("5", "6"):
        assert not page.run(solution)
        field.clear()
        field.send_keys(answer, Keys.ENTER)
        assert page.run(grade) == learn("7a", "--answer", answer)["text"]
    assert page.run(solution)  # after two misses
    field.clear()
    field.send_keys("19/4", Keys.ENTER)
    assert page.run(grade) == learn("7a", "--answer", "19/4")["text"]
    page.driver.find_element("id", "answer-7b").send_keys("2", Keys.ENTER)
    # An explanation: the model answer first, then the learner's verdict.
    last = "document.querySelector('[data-exercise=\"7c\"]')"
    page.run(f"{last}.querySelector('form').requestSubmit()")
    assert page.run(f"return {last}.querySelector('.model').textContent") == learn("7c", "--solution")["solution"]
    page.run(f"{last}.querySelector('[data-verdict=yes]').click()")
    page.open("learn")
    assert page.run("return document.querySelector('#room-picture').textContent").count("done, missed at first") == 1
    assert page.run("return document.querySelector('.missed a').textContent") == "7a"
    kept = json.loads(page.run("return localStorage.getItem('tessera.learn')"))
    file = tmp_path / "tessera/learn.json"
    file.write_text(json.dumps(kept), encoding="utf-8")  # the command goes on from the page's answers
    assert [one["lesson"] for one in learn()["lessons"] if one["done"]] == [7]
    page.run("localStorage.clear()")
    page.open("learn")
    page.run("document.querySelector('#room-picture details').open = true")
    page.driver.find_element("id", "learn-file").send_keys(str(file))  # and the page from the command's
    page.until("return document.querySelector('#room-picture').textContent.includes('✓ done')")
    page.run("localStorage.clear()")


def answer_in(page, exercise, text):
    """Types an answer to an exercise that is a number; returns the grade."""
    field = page.driver.find_element("id", f"answer-{exercise.replace(' ', '-')}")
    field.clear()
    field.send_keys(text, Keys.ENTER)
    return page.run("return document.querySelector(`[data-exercise='${arguments[0]}'] .grade`).textContent", exercise)


def test_recaps_and_exam_are_judged_as_by_the_command(page, tmp_path):
    def learn(*args):
        return json.loads(subprocess.run([COMMAND, "learn", *args, "--json"], capture_output=True, text=True, check=False,
                                         env={**os.environ, "XDG_STATE_HOME": str(tmp_path)}).stdout)

    def judge(exercise, verdict):
        card = f"document.querySelector(`[data-exercise='{exercise}']`)"
        page.run(f"{card}.querySelector('form').requestSubmit()")
        model = page.run(f"return {card}.querySelector('.model').textContent").strip()
        page.run(f"{card}.querySelector('[data-verdict={verdict}]').click()")
        return model

    quizzes = learn()["quizzes"]
    page.open("learn")
    page.run("localStorage.clear()")
    page.open("learn?lesson=recap")
    asked = "return [...document.querySelectorAll('[data-exercise]')].map(n => n.dataset.exercise)"
    assert page.run(asked) == [one["exercise"] for quiz in quizzes[:5] for one in quiz["exercises"]]
    assert page.run("return document.querySelector('[data-quiz]').open")
    assert answer_in(page, "recap 1d", "2") == learn("recap", "1d", "--answer", "2")["text"]
    assert answer_in(page, "recap 1d", "4") == learn("recap", "1d", "--answer", "4")["text"]
    assert "(lesson 1)" in judge("recap 1a", "no")
    page.open("learn?lesson=exam")
    assert page.run(asked) == [one["exercise"] for quiz in quizzes[5:] for one in quiz["exercises"]]
    assert "memory-bound" in judge("exam 1", "yes")
    assert "bold" in page.run("return document.querySelector('#room-picture').textContent")
    assert page.run("return document.querySelector(`[data-exercise='exam 1'] .model strong`).textContent") == "memory-bound"
    choose(page, "device", "a100")
    choose(page, "len", "4096")
    model = ("--device", "a100", "--len", "4096")
    asked_here = "return document.querySelector(`[data-exercise='estimate a'] .task`).textContent"
    assert page.run(asked_here) == learn("estimate", *model)["exercises"][0]["task"]
    for exercise, answer in (("estimate a", "206"), ("estimate b", "144"), ("estimate d", "9")):
        assert answer_in(page, exercise, answer) == learn(*exercise.split(), *model, "--answer", answer)["text"]
    choose(page, "len", "0")
    assert page.run("return document.querySelector('#room-picture [role=alert]').textContent").startswith("len: expected")
    page.open("learn?lesson=exam")
    assert page.run("return document.querySelector('#c-device').value") == "a100"  # the model is kept
    page.open("learn")
    missed = page.run("return [...document.querySelectorAll('.missed a')].map(a => a.textContent)")
    assert missed == ["recap 1a", "recap 1d", "estimate d"]
    page.run("document.querySelectorAll('.missed a')[1].click()")  # leads to the question itself
    page.until("return document.activeElement.id === 'answer-recap-1d'")
    page.open("learn")
    assert "1 of 25" in page.run("return document.querySelector('#room-picture').textContent")
    (tmp_path / "tessera/learn.json").write_text(page.run("return localStorage.getItem('tessera.learn')"), encoding="utf-8")
    assert [one["exercise"] for quiz in learn()["quizzes"] for one in quiz["exercises"] if one["again"]] == missed
    page.run("localStorage.clear()")


def test_kernels_of_ones_own_are_saved(page, downloads, tmp_path):
    page.open("learn?lesson=kernel")
    assert "judge.py mine.py" in page.run("return document.querySelector('#room-picture').textContent")
    files = page.run("return [...document.querySelectorAll('[data-file]')].map(n => n.dataset.file)")
    assert len(files) == 6
    assert page.run("return document.querySelector('[data-file=\"forward.py\"] pre').textContent") == (
        ROOT / "docs/learn/your_kernel/forward.py").read_text(encoding="utf-8")
    path = downloads / "your_kernel.zip"
    path.unlink(missing_ok=True)
    page.run("[...document.querySelectorAll('#room-picture button')].find(b => b.textContent.endsWith('.zip')).click()")
    for _ in range(100):
        if path.exists() and path.stat().st_size > 1000:
            break
        page.driver.execute_async_script("setTimeout(arguments[0], 100)")
    with zipfile.ZipFile(path) as packed:
        packed.extractall(tmp_path)
    for name in (*files, "judge.py", "memory.py", "memory.hpp", "compiled.py", "entry.cc"):
        place = f"docs/learn/your_kernel/{name}"
        assert (tmp_path / place).read_bytes() == (ROOT / place).read_bytes()

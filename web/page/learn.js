// SPDX-License-Identifier: Apache-2.0
//
// Room: the lessons of docs/learn, and the FAQ. Exercises and grades are the core's, as in `tessera learn`; the answers
// are kept in the browser in the command's own format.
import {ask} from './core.js';
import {element} from './dom.js';
import {pages, roomsOf} from './path.js';
import {save} from './picture.js';

const KEY = 'tessera.learn', FORMAT = 'tessera learn, answers';
/** Pages of the path that are no lessons. */
const PAGES = {recap: 'Recap: five questions after each part', exam: 'Twenty questions of an interviewer', faq: 'Questions that everybody asks'};

/** All answers ever given, oldest first; none where the browser keeps nothing. */
function answers() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY));
    return kept?.format === FORMAT && Array.isArray(kept.answers) ? kept.answers : [];
  } catch { return []; }
}

function keep(given) {
  try { localStorage.setItem(KEY, JSON.stringify({format: FORMAT, answers: given})); } catch { /* kept until the page is left */ }
}

/** Adds an answer; its exercise is named as in learn.json. */
const keepOne = (exercise, answer, right) => keep([...answers(), {exercise: exercise.saved, answer, right, at: new Date().toISOString().replace(/\.\d+Z/, 'Z')}]);

/** All lessons, with what the answers say about their exercises. */
const lessonsNow = () => ask({ask: 'lessons', answers: answers()});
const link = (lesson, text) => element('a', {href: `#learn?lesson=${lesson}`}, text);

/** HTML that web/lessons.py made of a page of docs/learn. */
function made(html) {
  const node = element('div', {class: 'lesson'});
  node.innerHTML = html;
  return node;
}

function stateOf(lesson) {
  const right = lesson.exercises.filter((one) => one.done).length;
  if (lesson.done) return lesson.exercises.some((one) => one.again) ? ' ✓ done, missed at first' : ' ✓ done';
  return lesson.exercises.some((one) => one.tries > 0) ? ` ${right} of ${lesson.exercises.length}` : '';
}

function listOf(lessons) {
  const parts = [...new Set(lessons.map((l) => l.part))];
  return parts.flatMap((part) => {
    const own = lessons.filter((l) => l.part === part);
    return [element('h2', {}, `Part ${part}: ${own[0].part_title}`),
      element('ol', {start: own[0].lesson}, own.map((l) => element('li', {}, link(l.lesson, l.title), element('span', {class: 'note'}, stateOf(l)))))];
  });
}

/** Links to the exercises that were missed and come again. */
function missedOf(lessons) {
  const missed = lessons.flatMap((l) => l.exercises.filter((one) => one.again).map((one) => link(l.lesson, one.exercise)));
  return missed.length === 0 ? null : element('p', {class: 'missed'}, 'Missed, until right twice: ', ...missed.flatMap((one, i) => (i ? [', ', one] : [one])));
}

/** The learner's answers as a file, for `tessera learn` and back. */
function carry(change) {
  const input = element('input', {type: 'file', accept: '.json', id: 'learn-file', onchange: async () => {
    const note = document.getElementById('learn-note');
    try {
      const read = JSON.parse(await input.files[0].text());
      if (read.format !== FORMAT || !Array.isArray(read.answers)) throw new Error('expected learn.json of tessera learn, got another document');
      ask({ask: 'lessons', answers: read.answers});  // throws if an entry has another form
      keep(read.answers);
      change({lesson: ''});
    } catch (error) { note.textContent = `${error.message}. Your answers here are unchanged.`; }
  }});
  return element('details', {}, element('summary', {}, 'Take your progress along'),
    element('p', {}, 'The command keeps the same file at ', element('code', {}, '~/.local/state/tessera/learn.json'), '.'),
    element('p', {}, element('button', {type: 'button', onclick: () => save('learn.json', new Blob([JSON.stringify({format: FORMAT, answers: answers()}, null, 2)]))}, 'Save learn.json')),
    element('p', {}, element('label', {for: 'learn-file'}, 'Or load one: '), input), element('p', {id: 'learn-note', class: 'error', role: 'status'}));
}

/** Links to the rooms that show what the lesson says. */
function seen(lesson) {
  const rooms = roomsOf(lesson);
  return rooms.length === 0 ? null : element('p', {}, 'See it move: ', rooms.flatMap((room, i) => [i > 0 ? ', ' : '', element('a', {href: `#${room}`}, document.querySelector(`nav a[href='#${room.split('?')[0]}']`).textContent)]));
}

const MISSES_BEFORE_SOLUTION = 2;  // as in toolkit/learn/standing.hpp
const SHOWN = '(shown)';

/** An exercise whose answer is the learner's own explanation: the model answer, then yes or no. */
function explained(one, say) {
  const grade = element('p', {class: 'grade', role: 'status'});
  const model = element('p', {class: 'task model', hidden: true});
  const verdict = (word) => element('button', {type: 'button', 'data-verdict': word, onclick: () => {
    const result = ask({ask: 'grade', exercise: one.exercise, answer: word});
    grade.textContent = result.text;
    say(result.text);
    keepOne(one, word, result.right);
  }}, word);
  const asked = element('p', {class: 'quiz', hidden: true}, 'Did you say that? ', verdict('yes'), verdict('no'));
  const own = element('textarea', {id: `own-${one.exercise}`, rows: 3});
  const show = element('button', {type: 'submit'}, 'Compare');
  return [element('form', {class: 'explain', onsubmit: (event) => {
    event.preventDefault();
    model.textContent = ask({ask: 'solution', exercise: one.exercise}).text;
    model.hidden = asked.hidden = false;
  }}, element('label', {for: `own-${one.exercise}`}, 'In your own words, or aloud'), own, show), model, asked, grade];
}

/** An exercise with a number or a word. */
function answered(one, say) {
  const id = `answer-${one.exercise}`;
  const input = element('input', {type: 'text', id, autocomplete: 'off'});
  const grade = element('p', {class: 'grade', role: 'status'});
  let misses = one.done ? 0 : one.misses, done = one.done;
  const solution = element('button', {type: 'button', class: 'solution', hidden: misses < MISSES_BEFORE_SOLUTION, onclick: () => {
    grade.textContent = ask({ask: 'solution', exercise: one.exercise}).text;
    if (!done) keepOne(one, SHOWN, false);
  }}, 'Show me');
  const hint = element('button', {type: 'button', onclick: () => { grade.textContent = one.hint; }}, 'Hint');
  const check = (event) => {
    event.preventDefault();
    let result;
    try {
      result = ask({ask: 'grade', exercise: one.exercise, answer: input.value});
    } catch (error) {
      grade.textContent = error.message;
      return;
    }
    misses += result.right ? 0 : 1;
    done = done || result.right;
    solution.hidden = misses < MISSES_BEFORE_SOLUTION;
    grade.textContent = result.text;
    say(result.text);
    keepOne(one, input.value, result.right);
  };
  return [element('form', {class: 'quiz', onsubmit: check}, element('label', {for: id}, 'Your answer'), input, element('button', {type: 'submit'}, 'Check'), hint, solution), grade];
}

function exercise(one, say) {
  return element('section', {class: 'card', 'aria-label': `Exercise ${one.exercise}`, 'data-exercise': one.exercise},
    element('h2', {}, `${one.exercise}: ${one.kind}`), element('p', {class: 'task'}, one.task), ...(one.kind === 'explain' ? explained(one, say) : answered(one, say)));
}

function page(lessons, values, say) {
  const parts = pages[values.lesson], index = lessons.findIndex((l) => `${l.lesson}` === values.lesson);
  const lesson = lessons[index], back = element('p', {}, element('a', {href: '#learn'}, '← All lessons'));
  if (!lesson) return [back, made(parts.body)];
  const next = lessons[index + 1];
  return [back, element('p', {class: 'note'}, 'Answer for yourself before you read on:'), made(parts.opening),
    element('details', {class: 'unfold'}, element('summary', {}, 'I have an answer. Read on'), made(parts.body)), seen(lesson.lesson), ...lesson.exercises.map((one) => exercise(one, say)),
    parts.code && element('details', {}, element('summary', {}, 'In the code'), made(parts.code)),
    next ? element('p', {class: 'next'}, link(next.lesson, `Next: ${next.lesson}. ${next.title}`)) : element('p', {class: 'next'}, link('recap', `Next: ${PAGES.recap}`))];
}

export const learn = {
  id: 'learn',
  title: 'Learn',
  question: 'How does FlashAttention work, step by step?',
  lead: 'Lessons of five to eight minutes, one a day. Each asks a question first, then answers it with one picture, and ends with exercises that are judged here.',
  controls: [],
  defaults: {lesson: ''},
  titleOf({lesson}) {
    const found = ask({ask: 'lessons'}).find((l) => `${l.lesson}` === lesson);
    return found ? `${found.lesson}. ${found.title}` : PAGES[lesson];
  },
  draw(values, say, change) {
    const lessons = lessonsNow();
    if (values.lesson in pages) return page(lessons, values, say);
    if (values.lesson) throw new Error(`lesson: expected 0 to ${lessons.length - 1}, recap, exam or faq, got ${values.lesson}`);
    const today = lessons.find((l) => !l.done);
    return [today ? element('p', {class: 'next'}, link(today.lesson, `${answers().length ? 'Go on with' : 'Begin with'} ${today.lesson}. ${today.title}`)) : element('p', {}, 'All lessons are done.'),
      missedOf(lessons), ...listOf(lessons), ...Object.entries(PAGES).map(([id, title]) => element('p', {}, link(id, title))), carry(change)];
  },
};

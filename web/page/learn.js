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

const of = (given, lesson) => given.filter((answer) => answer.lesson === lesson);
const isDone = (given, lesson) => of(given, lesson).some((answer) => answer.right);
const wasMissed = (given, lesson) => of(given, lesson)[0]?.right === false;
const link = (lesson, text) => element('a', {href: `#learn?lesson=${lesson}`}, text);

/** HTML that web/lessons.py made of a page of docs/learn. */
function made(html) {
  const node = element('div', {class: 'lesson'});
  node.innerHTML = html;
  return node;
}

function listOf(lessons, given) {
  const parts = [...new Set(lessons.map((l) => l.part))];
  const state = (l) => (isDone(given, l.lesson) ? (wasMissed(given, l.lesson) ? ' ✓ done, missed at first' : ' ✓ done') : of(given, l.lesson).length ? ' tried' : '');
  return parts.flatMap((part) => {
    const own = lessons.filter((l) => l.part === part);
    return [element('h2', {}, `Part ${part}: ${own[0].part_title}`),
      element('ol', {start: own[0].lesson}, own.map((l) => element('li', {}, link(l.lesson, l.title), element('span', {class: 'note'}, state(l)))))];
  });
}

/** The learner's answers as a file, for `tessera learn` and back. */
function carry(change) {
  const input = element('input', {type: 'file', accept: '.json', id: 'learn-file', onchange: async () => {
    const note = document.getElementById('learn-note');
    try {
      const read = JSON.parse(await input.files[0].text());
      if (read.format !== FORMAT || !Array.isArray(read.answers)) throw new Error('expected learn.json of tessera learn, got another document');
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

function exercise(lesson, say) {
  const input = element('input', {type: 'text', id: 'learn-answer', autocomplete: 'off'});
  const grade = element('p', {class: 'grade', role: 'status'});
  const shown = element('button', {type: 'button', hidden: true, onclick: () => {
    const solution = ask({ask: 'solution', lesson: lesson.lesson});
    grade.textContent = `${solution.answer}. ${solution.why}`;
  }}, 'Show me');
  let misses = 0;
  const check = (event) => {
    event.preventDefault();
    let result;
    try {
      result = ask({ask: 'grade', lesson: lesson.lesson, answer: input.value});
    } catch (error) {
      grade.textContent = error.message;
      return;
    }
    misses += result.right ? 0 : 1;
    shown.hidden = misses < 2;
    grade.textContent = result.text;
    say(result.text);
    keep([...answers(), {lesson: lesson.lesson, answer: input.value, right: result.right, at: new Date().toISOString().replace(/\.\d+Z/, 'Z')}]);
  };
  return element('section', {class: 'card', 'aria-label': 'Exercise'}, element('h3', {}, 'Exercise'), element('p', {class: 'task'}, lesson.task),
    element('form', {class: 'quiz', onsubmit: check}, element('label', {for: 'learn-answer'}, 'Your answer'), input, element('button', {type: 'submit'}, 'Check'), shown), grade);
}

function page(lessons, values, say) {
  const parts = pages[values.lesson], index = lessons.findIndex((l) => `${l.lesson}` === values.lesson);
  const lesson = lessons[index], back = element('p', {}, element('a', {href: '#learn'}, '← All lessons'));
  if (!lesson) return [back, element('h2', {}, PAGES[values.lesson]), made(parts.body)];
  const next = lessons[index + 1];
  return [back, element('h2', {}, `${lesson.lesson}. ${lesson.title}`), element('p', {class: 'note'}, 'Answer for yourself before you read on:'), made(parts.opening),
    element('details', {class: 'unfold'}, element('summary', {}, 'I have an answer. Read on'), made(parts.body)), seen(lesson.lesson), exercise(lesson, say),
    parts.code && element('details', {}, element('summary', {}, 'In the code'), made(parts.code)),
    next ? element('p', {class: 'next'}, link(next.lesson, `Next: ${next.lesson}. ${next.title}`)) : element('p', {class: 'next'}, link('recap', `Next: ${PAGES.recap}`))];
}

export const learn = {
  id: 'learn',
  title: 'Learn',
  question: 'How does FlashAttention work, step by step?',
  lead: 'Lessons of five to eight minutes, one a day. Each asks a question first, then answers it with one picture, and ends with an exercise that is judged here.',
  controls: [],
  defaults: {lesson: ''},
  draw(values, say, change) {
    const lessons = ask({ask: 'lessons'});
    if (values.lesson in pages) return page(lessons, values, say);
    if (values.lesson) throw new Error(`lesson: expected ${lessons[0].lesson} to ${lessons.at(-1).lesson}, recap, exam or faq, got ${values.lesson}`);
    const given = answers(), today = lessons.find((l) => !isDone(given, l.lesson));
    return [today ? element('p', {class: 'next'}, link(today.lesson, `${given.length ? 'Go on with' : 'Begin with'} ${today.lesson}. ${today.title}`)) : element('p', {}, 'All lessons are done.'),
      ...listOf(lessons, given), ...Object.entries(PAGES).map(([id, title]) => element('p', {}, link(id, title))), carry(change)];
  },
};

// SPDX-License-Identifier: Apache-2.0
//
// Room: the lessons of docs/learn with recaps, exam, a kernel of one's own and the FAQ. Exercises and grades are the
// core's, as in `tessera learn`; the answers are kept in the browser in the command's own format.
import {gpus, MASKS} from './choices.js';
import {form} from './controls.js';
import {ask} from './core.js';
import {element} from './dom.js';
import {pages, roomsOf} from './path.js';
import {save} from './picture.js';

const KEY = 'tessera.learn', MODEL_KEY = 'tessera.learn.model', FORMAT = 'tessera learn, answers';
/** Pages of the path that are no lessons. */
const PAGES = {recap: 'Recap: five questions after each part', kernel: 'A kernel of your own', exam: 'Exam: twenty questions of an interviewer, and your own model', faq: 'Questions that everybody asks'};

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
/** The recaps, the exam and the estimates, in the same way. An estimate is about `model`, if there is one. */
const quizzesNow = (model) => ask({ask: 'quizzes', answers: answers(), model});
/** The page of a quiz: "recap" of "recap 2". */
const pageOf = (quiz) => (quiz.quiz === 'estimate' ? 'exam' : quiz.quiz.split(' ')[0]);
const link = (lesson, text) => element('a', {href: `#learn?lesson=${lesson}`}, text);

/** HTML that web/lessons.py made of a page of docs/learn. */
function made(html) {
  const node = element('div', {class: 'lesson'});
  node.innerHTML = html;
  return node;
}

/** The state of a lesson's exercises, or of the questions of a page. */
function stateOf(exercises) {
  const right = exercises.filter((one) => one.done).length;
  if (exercises.length > 0 && right === exercises.length) return exercises.some((one) => one.again) ? ' ✓ done, missed at first' : ' ✓ done';
  return exercises.some((one) => one.tries > 0) ? ` ${right} of ${exercises.length}` : '';
}

function listOf(lessons) {
  const parts = [...new Set(lessons.map((l) => l.part))];
  return parts.flatMap((part) => {
    const own = lessons.filter((l) => l.part === part);
    return [element('h2', {}, `Part ${part}: ${own[0].part_title}`),
      element('ol', {start: own[0].lesson}, own.map((l) => element('li', {}, link(l.lesson, l.title), element('span', {class: 'note'}, stateOf(l.exercises)))))];
  });
}

/** Links to the other pages of the path, with the state of their questions. */
function othersOf(quizzes) {
  const questions = (id) => quizzes.filter((quiz) => pageOf(quiz) === id).flatMap((quiz) => quiz.exercises);
  return Object.entries(PAGES).map(([id, title]) => element('p', {}, link(id, title), element('span', {class: 'note'}, stateOf(questions(id)))));
}

/** Links to the exercises that were missed and come again. */
function missedOf(lessons, quizzes) {
  const again = (list, page) => list.filter((one) => one.again).map((one) => link(`${page}&at=${encodeURIComponent(one.exercise)}`, one.exercise));
  const missed = [...lessons.flatMap((l) => again(l.exercises, l.lesson)), ...quizzes.flatMap((quiz) => again(quiz.exercises, pageOf(quiz)))];
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
      change({lesson: '', at: ''});
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

/** Puts the model answer into `node`: that of recap.md or exam.md, which has links and bold words, or the core's. */
function modelAnswer(one, node) {
  const written = pages.recap.answers[one.exercise] ?? pages.exam.answers[one.exercise];
  if (written) node.innerHTML = written;
  else node.textContent = ask({ask: 'solution', exercise: one.exercise}).text;
}

/** An exercise whose answer is the learner's own explanation: the model answer, then yes or no. */
function explained(one, say) {
  const id = `own-${one.exercise.replaceAll(' ', '-')}`;
  const grade = element('p', {class: 'grade', role: 'status'});
  const model = element('div', {class: 'task model', hidden: true});
  const verdict = (word) => element('button', {type: 'button', 'data-verdict': word, onclick: () => {
    const result = ask({ask: 'grade', exercise: one.exercise, answer: word});
    grade.textContent = result.text;
    say(result.text);
    keepOne(one, word, result.right);
  }}, word);
  const asked = element('p', {class: 'quiz', hidden: true}, 'Did you say that? ', verdict('yes'), verdict('no'));
  return [element('form', {class: 'explain', onsubmit: (event) => {
    event.preventDefault();
    modelAnswer(one, model);
    model.hidden = asked.hidden = false;
  }}, element('label', {for: id}, 'In your own words, or aloud'), element('textarea', {id, rows: 3}), element('button', {type: 'submit'}, 'Compare')), model, asked, grade];
}

/** An exercise with a number or a word. An estimate is about `model`. */
function answered(one, say, model) {
  const id = `answer-${one.exercise.replaceAll(' ', '-')}`;
  const input = element('input', {type: 'text', id, autocomplete: 'off'});
  const grade = element('p', {class: 'grade', role: 'status'});
  let misses = one.done ? 0 : one.misses, done = one.done;
  const solution = element('button', {type: 'button', class: 'solution', hidden: misses < MISSES_BEFORE_SOLUTION, onclick: () => {
    grade.textContent = ask({ask: 'solution', exercise: one.exercise, model}).text;
    if (!done) keepOne(one, SHOWN, false);
  }}, 'Show me');
  const hint = element('button', {type: 'button', onclick: () => { grade.textContent = one.hint; }}, 'Hint');
  const check = (event) => {
    event.preventDefault();
    let result;
    try {
      result = ask({ask: 'grade', exercise: one.exercise, answer: input.value, model});
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

function exercise(one, say, model) {
  return element('section', {class: 'card', 'aria-label': `Exercise ${one.exercise}`, 'data-exercise': one.exercise},
    element('h2', {}, `${one.exercise}: ${one.kind}`), element('p', {class: 'task'}, one.task), ...(one.kind === 'explain' ? explained(one, say) : answered(one, say, model)));
}

const JUDGED = 'Answer in your own words, then compare. What you missed is asked again until it is right twice.';

/** Five questions after each part. The first part that is not done stands open. */
function recap(lessons, say) {
  const quizzes = quizzesNow().filter((quiz) => pageOf(quiz) === 'recap');
  const first = quizzes.find((quiz) => !quiz.exercises.every((one) => one.done)) ?? quizzes[0];
  return [element('p', {}, 'Come back a few days after a part. ', JUDGED), ...quizzes.map((quiz, i) => element('details', {open: quiz === first, 'data-quiz': quiz.quiz},
    element('summary', {}, `${quiz.title}: ${lessons.find((l) => l.part === i + 1).part_title}`, element('span', {class: 'note'}, stateOf(quiz.exercises))),
    ...quiz.exercises.map((one) => exercise(one, say))))];
}

const MODEL = {device: 'h200', layers: '32', heads: '32/8', head_dim: '128', len: '8192', causal: 'none', share: '0.3'};
const MODEL_FIELDS = [
  {name: 'device', label: 'GPU', options: gpus}, {name: 'layers', label: 'Layers', min: 1, max: 1000}, {name: 'heads', label: 'Heads: queries/keys', text: true},
  {name: 'head_dim', label: 'head_dim', min: 1, max: 256}, {name: 'len', label: 'Length in tokens', min: 1, max: 1048576}, {name: 'causal', label: 'Mask', options: MASKS.slice(0, 2)},
  {name: 'share', label: 'Attention’s share (0 to 1)', min: 0.01, max: 0.99, step: 0.01},
];

function keptModel() {
  try { return {...MODEL, ...JSON.parse(localStorage.getItem(MODEL_KEY))}; } catch { return MODEL; }
}

/** The learner states a model, and estimates what FlashAttention gains in it. */
function estimates(say) {
  const list = element('div');
  let given = keptModel();
  const fill = () => {
    const model = {device: given.device, layers: Number(given.layers), heads: given.heads, head_dim: Number(given.head_dim), len: Number(given.len), causal: given.causal !== 'none', share: Number(given.share)};
    try {
      list.replaceChildren(...quizzesNow(model).find((quiz) => quiz.quiz === 'estimate').exercises.map((one) => exercise(one, say, model)));
    } catch (error) { list.replaceChildren(element('p', {class: 'error', role: 'alert'}, error.message)); }
  };
  fill();
  return [element('p', {}, 'State your model. Then estimate with a pencil, by the rules of thumb of ', link(15, 'lesson 15'), '. The judge compares with the prediction, and names the nearest measured call.'),
    form(MODEL_FIELDS, given, (name, value) => {
      given = {...given, [name]: value};
      try { localStorage.setItem(MODEL_KEY, JSON.stringify(given)); } catch { /* kept until the page is left */ }
      fill();
    }), list];
}

function exam(say) {
  const questions = quizzesNow().find((quiz) => quiz.quiz === 'exam').exercises;
  const last = () => { const title = document.getElementById('estimate'); title.focus(); title.scrollIntoView(); };
  return [element('p', {}, JUDGED, ' You pass if you said what stands in bold.'), element('p', {}, element('button', {type: 'button', onclick: last}, 'To the last part: your own model')), ...questions.map((one) => exercise(one, say)),
    element('h2', {id: 'estimate', tabindex: -1}, 'What does FlashAttention gain in your model?'), ...estimates(say),
    element('details', {}, element('summary', {}, 'An example, and the table of measurements'), made(pages.exam.body))];
}

/** The files with blanks, which the learner saves and fills in, and the judge's command. */
function kernel() {
  const {body, files, zip} = pages.kernel;
  const folder = () => new Blob([Uint8Array.from(atob(zip), (letter) => letter.charCodeAt(0))]);
  const numberOf = (text) => text.match(/Your kernel (\d)/)?.[1];
  const blanks = Object.entries(files).filter(([, text]) => numberOf(text)).sort(([, a], [, b]) => numberOf(a) - numberOf(b));
  return [element('p', {}, 'Python cannot run in this page, which is one file without a network: save the files, and run the judge on your machine.'),
    element('p', {}, element('button', {type: 'button', onclick: () => save('your_kernel.zip', folder())}, 'Save your_kernel.zip'), ' Unpack it with ', element('code', {}, 'python3 -m zipfile -e your_kernel.zip .'), ', then type the commands below.'),
    made(body), element('h2', {}, 'The files with blanks'),
    ...blanks.map(([name, text]) => element('details', {'data-file': name}, element('summary', {}, name), element('pre', {tabindex: 0, class: 'file'}, text),
      element('p', {}, element('button', {type: 'button', onclick: () => save(name, new Blob([text]))}, `Save ${name}`)))),
    element('p', {class: 'next'}, link('exam', `Next: ${PAGES.exam}`))];
}

function page(lessons, values, say) {
  const parts = pages[values.lesson], index = lessons.findIndex((l) => `${l.lesson}` === values.lesson);
  const lesson = lessons[index], back = element('p', {}, element('a', {href: '#learn'}, '← All lessons'));
  const others = {recap: () => recap(lessons, say), exam: () => exam(say), kernel};
  if (!lesson) return [back, ...(others[values.lesson]?.() ?? [made(parts.body)])];
  const next = lessons[index + 1];
  return [back, element('p', {class: 'note'}, 'Answer for yourself before you read on:'), made(parts.opening),
    element('details', {class: 'unfold'}, element('summary', {}, 'I have an answer. Read on'), made(parts.body)), seen(lesson.lesson), ...lesson.exercises.map((one) => exercise(one, say)),
    parts.code && element('details', {}, element('summary', {}, 'In the code'), made(parts.code)),
    next?.part === lesson.part ? null : element('p', {}, `Part ${lesson.part} ends here. In a few days, answer `, link('recap', 'five questions about it'), '.'),
    element('p', {class: 'next'}, next ? link(next.lesson, `Next: ${next.lesson}. ${next.title}`) : link('kernel', `Next: ${PAGES.kernel}`))];
}

/** Scrolls to an exercise of the page, and puts the cursor into its answer. */
function showAt(exercise) {
  const card = [...document.querySelectorAll('[data-exercise]')].find((one) => one.dataset.exercise === exercise);
  if (!card) return;
  for (let node = card; node; node = node.parentElement) if (node.tagName === 'DETAILS') node.open = true;
  card.scrollIntoView();
  card.querySelector('input, textarea').focus();
}

export const learn = {
  id: 'learn',
  title: 'Learn',
  question: 'How does FlashAttention work, step by step?',
  lead: 'Lessons of five to eight minutes, one a day. Each asks a question first, then answers it with one picture, and ends with exercises that are judged here.',
  controls: [],
  defaults: {lesson: '', at: ''},
  titleOf({lesson}) {
    const found = ask({ask: 'lessons'}).find((l) => `${l.lesson}` === lesson);
    return found ? `${found.lesson}. ${found.title}` : PAGES[lesson];
  },
  draw(values, say, change) {
    const lessons = lessonsNow();
    if (values.lesson in pages) {
      if (values.at) setTimeout(() => showAt(values.at));
      return page(lessons, values, say);
    }
    if (values.lesson) throw new Error(`lesson: expected 0 to ${lessons.length - 1}, ${Object.keys(PAGES).join(', ')}, got ${values.lesson}`);
    const quizzes = quizzesNow(), today = lessons.find((l) => !l.done);
    return [today ? element('p', {class: 'next'}, link(today.lesson, `${answers().length ? 'Go on with' : 'Begin with'} ${today.lesson}. ${today.title}`)) : element('p', {}, 'All lessons are done. The ', link('exam', 'exam'), ' is left, and ', link('kernel', 'a kernel of your own'), '.'),
      missedOf(lessons, quizzes), ...listOf(lessons), element('h2', {}, 'After the lessons'), ...othersOf(quizzes), carry(change)];
  },
};

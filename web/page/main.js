// SPDX-License-Identifier: Apache-2.0
//
// The page: its rooms (views), and their state in the URL: #walk?row=100&step=3. Default values are left out.
import {ask, start} from './core.js';
import {form, refill} from './controls.js';
import {element} from './dom.js';
import {lessonsOf} from './path.js';
import {stop} from './player.js';
import {backward} from './backward.js';
import {compare} from './compare.js';
import {learn} from './learn.js';
import {paper} from './paper.js';
import {race} from './race.js';
import {roofline} from './roofline.js';
import {tiles} from './tiles.js';
import {walk} from './walk.js';
import {which} from './which.js';

/** In the order of the lessons. */
const ROOMS = [compare, learn, tiles, walk, paper, backward, race, which, roofline];
const place = (id) => document.getElementById(id);
let room = null;
let values = {};
let waiting = 0;

function fromUrl() {
  const [id, query = ''] = location.hash.slice(1).split('?');
  const chosen = ROOMS.find((r) => r.id === id) ?? ROOMS[0];
  const given = Object.fromEntries(new URLSearchParams(query));
  return {chosen, given: Object.fromEntries(Object.entries(given).filter(([name]) => name in chosen.defaults))};
}

function toUrl() {
  const query = new URLSearchParams(Object.entries(values).filter(([name, value]) => value !== room.defaults[name]));
  const text = query.toString();
  history.replaceState(null, '', `#${room.id}${text ? `?${text}` : ''}`);
}

/** Lets screen readers announce a sentence; sentences within a moment are announced as one. */
function say(sentence) {
  clearTimeout(waiting);
  waiting = setTimeout(() => { place('said').textContent = sentence; }, 250);
}

function redraw() {
  stop();
  const out = place('room-picture');
  try {
    out.replaceChildren(...room.draw(values, say, change).filter(Boolean));
  } catch (error) {
    out.replaceChildren(element('p', {class: 'error', role: 'alert'}, error.message));
  }
  out.querySelectorAll('.picture').forEach((figure) => figure.redraw());
}

/** Changes a room's values; with `quiet` the room has already drawn the change. */
function change(patch, quiet = false) {
  values = {...values, ...patch};
  toUrl();
  if (quiet) return;
  refill(place('room-form'), room.controls, values);
  redraw();
}

function enter(focus) {
  const {chosen, given} = fromUrl();
  room = chosen;
  values = {...room.defaults, ...given};
  const title = room.titleOf?.(values) ?? room.question;
  document.title = `${title} — tessera`;
  document.querySelector('meta[name=description]').content = room.lead;
  for (const link of document.querySelectorAll('nav a')) {
    if (link.hash === `#${room.id}`) link.setAttribute('aria-current', 'page'); else link.removeAttribute('aria-current');
  }
  place('room-title').textContent = title;
  place('room-lead').textContent = values.lesson ? '' : room.lead;
  const fields = form(room.controls, values, (name, value) => change(name === 'ask' || !('step' in room.defaults) ? {[name]: value} : {[name]: value, step: room.defaults.step}));
  const open = room.formFirst || room.controls.some((spec) => values[spec.name] !== room.defaults[spec.name]);
  place('room-form').replaceChildren(room.controls.length === 0 ? '' : room.formFirst ? fields
    : element('details', {open}, element('summary', {}, 'Change what is shown'), fields));
  if (room.formFirst) place('room-picture').before(place('room-form')); else place('room-picture').after(place('room-form'));
  place('room-next').replaceChildren(...nextOf(room));
  redraw();
  if (focus) place('room-title').focus();
}

/** Links to the lessons of a room, and to the next room. */
function nextOf(shown) {
  if (values.lesson) return [];  // a lesson has links of its own
  const next = ROOMS[ROOMS.indexOf(shown) + 1];
  const numbers = lessonsOf(shown.id);
  const lessons = ask({ask: 'lessons'}).filter((lesson) => numbers.includes(lesson.lesson));
  return [...lessons.map((lesson) => element('p', {}, element('a', {href: `#learn?lesson=${lesson.lesson}`}, `Lesson ${lesson.lesson}: ${lesson.title}`))),
    next && element('p', {class: 'next'}, element('a', {href: `#${next.id}`}, `Next: ${next.question}`))].filter(Boolean);
}

async function run() {
  // A link to the hash that is there already gives no event of its own.
  const open = (r) => () => { if (location.hash === `#${r.id}`) enter(true); };
  place('rooms').replaceChildren(...ROOMS.map((r) => element('li', {}, element('a', {href: `#${r.id}`, onclick: open(r)}, r.title))));
  try {
    await start();
  } catch (error) {
    place('room-lead').textContent = `The core did not start: ${error.message}`;
    return;
  }
  enter(false);
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
  addEventListener('hashchange', () => enter(true));
  let width = innerWidth;
  addEventListener('resize', () => {
    if (innerWidth === width) return;
    width = innerWidth;
    document.querySelectorAll('.picture').forEach((figure) => figure.redraw());
  });
}

run();

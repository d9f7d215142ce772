// SPDX-License-Identifier: Apache-2.0
//
// The page: its rooms (views), and their state in the URL: #walk?row=100&step=3. Default values are left out.
import {start} from './core.js';
import {form, refill} from './controls.js';
import {element} from './dom.js';
import {stop} from './player.js';
import {backward} from './backward.js';
import {paper} from './paper.js';
import {race} from './race.js';
import {roofline} from './roofline.js';
import {tiles} from './tiles.js';
import {walk} from './walk.js';
import {which} from './which.js';

const ROOMS = [tiles, walk, paper, roofline, race, backward, which];
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
  refill(place('room-form').firstElementChild, room.controls, values);
  redraw();
}

function enter(focus) {
  const {chosen, given} = fromUrl();
  room = chosen;
  values = {...room.defaults, ...given};
  document.title = `${room.title} — tessera`;
  for (const link of document.querySelectorAll('nav a')) {
    if (link.hash === `#${room.id}`) link.setAttribute('aria-current', 'page'); else link.removeAttribute('aria-current');
  }
  place('room-title').textContent = room.title;
  place('room-lead').textContent = room.lead;
  place('room-form').replaceChildren(form(room.controls, values, (name, value) => change(name === 'ask' || !('step' in room.defaults) ? {[name]: value} : {[name]: value, step: room.defaults.step})));
  redraw();
  if (focus) place('room-title').focus();
}

async function run() {
  place('rooms').replaceChildren(...ROOMS.map((r) => element('li', {}, element('a', {href: `#${r.id}`}, r.title))));
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

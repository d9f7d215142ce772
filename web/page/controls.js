// SPDX-License-Identifier: Apache-2.0
//
// Forms: the inputs of a room. Values are strings, as they stand in the URL.
import {element} from './dom.js';

function field(spec, value, change) {
  const id = `c-${spec.name}`;
  const attributes = {id, name: spec.name, onchange: (event) => change(spec.name, event.target)};
  if (spec.options) {
    const options = typeof spec.options === 'function' ? spec.options() : spec.options;
    return element('select', attributes, options.map((option) => {
      const [key, label] = Array.isArray(option) ? option : [option, option];
      return element('option', {value: key, selected: String(key) === value}, label);
    }));
  }
  if (spec.check) return element('input', {...attributes, type: 'checkbox', checked: value === '1'});
  if (spec.lines) return element('textarea', {...attributes, rows: spec.lines, spellcheck: 'false', oninput: attributes.onchange}, value);
  return element('input', {...attributes, type: spec.text ? 'text' : 'number', min: spec.min, max: spec.max, step: spec.step, value, autocomplete: 'off'});
}

/** The form of a room; change(name, text) is called when the reader changes a value. A control with `when` is shown
 * while when(values) holds. */
export function form(specs, values, change) {
  const changed = (name, target) => change(name, target.type === 'checkbox' ? (target.checked ? '1' : '0') : target.value);
  return element('form', {class: 'controls', 'aria-label': 'What to show', onsubmit: (event) => event.preventDefault()},
    specs.map((spec) => element('div', {class: spec.lines ? 'wide' : spec.check ? 'check' : null, 'data-control': spec.name, hidden: spec.when ? !spec.when(values) : false},
      element('label', {for: `c-${spec.name}`}, spec.label), field(spec, values[spec.name], changed))));
}

/** Puts values into an existing form. */
export function refill(node, specs, values) {
  for (const spec of specs) {
    const input = node.querySelector(`#c-${spec.name}`);
    if (!input) continue;
    if (spec.when) input.parentElement.hidden = !spec.when(values);
    if (input === document.activeElement) continue;
    if (spec.check) input.checked = values[spec.name] === '1';
    else if (input.value !== values[spec.name]) input.value = values[spec.name];
  }
}

/** The numeric values of a form, by name. */
export const numbers = (values, ...names) => Object.fromEntries(names.map((name) => [name, Number.parseInt(values[name], 10) || 0]));

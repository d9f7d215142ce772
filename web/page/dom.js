// SPDX-License-Identifier: Apache-2.0
//
// Builds elements and the text of numbers. Nothing here knows what a number means.

const SVG = 'http://www.w3.org/2000/svg';

/** Usage: element('p', {class: 'note'}, 'text', child). Attributes of null or false are left out. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? '' : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

export const count = (value) => value.toLocaleString('en-US');

export function bytes(value) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let power = 0;
  while (value >= 1024 && power < units.length - 1) { value /= 1024; power += 1; }
  return `${power === 0 ? value : value.toPrecision(3)} ${units[power]}`;
}

export function short(value) {
  const units = ['', ' k', ' M', ' G', ' T', ' P'];
  let power = 0;
  while (value >= 999.5 && power < units.length - 1) { value /= 1000; power += 1; }
  return `${value >= 100 || power === 0 ? Math.round(value) : Number(value.toPrecision(3))}${units[power]}`;
}

export const figures = (value, digits = 4) => (typeof value === 'string' ? value.replace('-inf', '−∞') : `${Number(value.toPrecision(digits))}`.replace('-', '−'));

export const percent = (part) => {
  const value = 100 * part;
  return value === 0 ? '0 %' : value < 0.01 ? `${value.toExponential(1)} %` : `${Number(value.toPrecision(3))} %`;
};

/** A number as text, with the core's own value in an attribute for tests. */
export const number = (key, value, text) => element('span', {class: 'n', 'data-key': key, 'data-value': JSON.stringify(value)}, text);

/** Formats rows of [term, node or text, ...] as a list of facts; long ones get a line of their own. */
export function facts(rows) {
  return element('dl', {class: 'facts'}, rows.filter(Boolean).map(([term, ...what]) => {
    const said = element('dd', {}, ...what);
    return element('div', {class: said.textContent.length > 24 ? 'long' : null}, element('dt', {}, term), said);
  }));
}

export function table(caption, head, rows) {
  return element('div', {class: 'scroll', tabindex: '0', role: 'region', 'aria-label': caption},
    element('table', {},
      element('caption', {}, caption),
      element('thead', {}, element('tr', {}, head.map((cell) => element('th', {scope: 'col'}, cell)))),
      element('tbody', {}, rows.map((row) => element('tr', {}, row.map((cell, index) => element(index === 0 ? 'th' : 'td', index === 0 ? {scope: 'row'} : {}, cell)))))));
}

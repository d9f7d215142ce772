// SPDX-License-Identifier: Apache-2.0
//
// A picture that is drawn at the width available, and saved as SVG or PNG.
import {element, shape} from './dom.js';

const KEPT = ['fill', 'stroke', 'stroke-width', 'stroke-dasharray', 'stroke-linejoin', 'paint-order', 'font-family', 'font-size', 'font-weight', 'opacity', 'text-anchor'];

/** Copies the picture so that it needs no style sheet. */
function alone(svg) {
  const copy = svg.cloneNode(true);
  const from = [svg, ...svg.querySelectorAll('*')];
  const to = [copy, ...copy.querySelectorAll('*')];
  from.forEach((node, index) => {
    const style = getComputedStyle(node);
    for (const name of KEPT) {
      const value = style.getPropertyValue(name);
      if (value) to[index].setAttribute(name, value);
    }
    to[index].removeAttribute('class');
  });
  const box = svg.viewBox.baseVal;
  copy.setAttribute('xmlns', 'http://www.w3.org/2000/svg');
  copy.setAttribute('width', box.width);
  copy.setAttribute('height', box.height);
  copy.prepend(shape('rect', {width: '100%', height: '100%', fill: getComputedStyle(document.body).backgroundColor}));
  return new XMLSerializer().serializeToString(copy);
}

export function save(name, blob) {
  const url = URL.createObjectURL(blob);
  const link = element('a', {href: url, download: name});
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

const svgBlob = (svg) => new Blob([alone(svg)], {type: 'image/svg+xml'});

async function savePng(name, svg) {
  const image = new Image();
  image.src = URL.createObjectURL(svgBlob(svg));
  await image.decode();
  const canvas = document.createElement('canvas');
  canvas.width = image.width * 2;
  canvas.height = image.height * 2;
  canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => save(name, blob), 'image/png');
}

/** Draws by draw(width), which returns {height, nodes}; a screen reader reads `description` instead. */
export function picture(name, title, description, draw) {
  const figure = element('figure', {class: 'picture', id: `picture-${name}`});
  const caption = element('figcaption', {}, title,
    element('span', {class: 'save'},
      element('button', {type: 'button', 'aria-label': `Save ${title} as SVG`, onclick: () => save(`${name}.svg`, svgBlob(figure.querySelector('svg')))}, 'SVG'),
      element('button', {type: 'button', 'aria-label': `Save ${title} as PNG`, onclick: () => savePng(`${name}.png`, figure.querySelector('svg'))}, 'PNG')));
  figure.append(caption);
  figure.redraw = (newDescription = description) => {
    const width = Math.max(280, Math.min(960, figure.clientWidth || 960));
    const {height, nodes} = draw(width);
    const svg = shape('svg', {viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': `${title}: ${newDescription}`}, nodes);
    figure.querySelector('svg')?.remove();
    figure.prepend(svg);
  };
  return figure;
}

export const text = (x, y, content, attributes = {}) => shape('text', {x, y, ...attributes}, content);
export const rect = (x, y, width, height, attributes = {}) => shape('rect', {x, y, width: Math.max(0, width), height: Math.max(0, height), ...attributes});
export const line = (x1, y1, x2, y2, attributes = {}) => shape('line', {x1, y1, x2, y2, ...attributes});
export const path = (points, attributes = {}) => shape('path', {d: points.map(([x, y], i) => `${i ? 'L' : 'M'}${x.toFixed(1)} ${y.toFixed(1)}`).join(''), ...attributes});

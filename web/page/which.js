// SPDX-License-Identifier: Apache-2.0
//
// Room: which attention kernel ran, by the names of kernels.
import {command, keepFile} from './core.js';
import {element, facts, number} from './dom.js';

const EXAMPLES = `void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>, true>(Flash_fwd_params)
fmha_cutlassF_bf16_aligned_64x128_rf_sm80
cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x128_4x1x1_kernel0_0
ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn`;

const SURE = {certain: 'the name spells it out', likely: 'it has one meaning in what is known', unsure: 'others use that word too', none: 'nothing speaks for it'};

function cardOf(kind, index) {
  const said = (name) => (kind[name] ? [[name.replace('_', ' '), String(kind[name])]] : []);
  return element('section', {class: 'card'},
    element('h2', {}, kind.algorithm || kind.family),
    facts([['family', number(`attention.${index}.family`, kind.family, kind.family)], ['does', `${kind.role}${kind.pass === 'unknown' ? '' : `, ${kind.pass}`}`],
      ['how sure', number(`attention.${index}.confidence`, kind.confidence, kind.confidence), ` — ${SURE[kind.confidence] ?? ''}`], ['result', kind.exactness === 'exact' ? 'exact attention' : kind.exactness.replace('_', ' ')],
      ...said('library'), ...said('release'), ...said('dtype'), ...said('mask'), ...said('head_dim'), ...(kind.tile ? [['tile', kind.tile.join(' × ')]] : []), ...(kind.arch ? [['compiled for', `sm${kind.arch}`]] : [])]),
    kind.evidence.length ? element('ul', {class: 'evidence'}, kind.evidence.map((why) => element('li', {}, why))) : '',
    element('p', {class: 'names'}, kind.kernels.map((kernel) => element('code', {}, kernel.name))));
}

const others = (title, list) => (list?.length ? element('section', {}, element('h2', {}, title), element('ul', {class: 'names'}, list.map((item) => element('li', {}, element('code', {}, item.name ?? String(item)), item.role ? ` ${item.role}` : '')))) : '');

/** The pasted names that are of no kind of attention. Nothing for a profiler's table, whose lines are more than names. */
function restOf(text, found) {
  const lines = text.split('\n').map((line) => line.trim()).filter(Boolean);
  const listed = [...found.attention.flatMap((kind) => kind.kernels), ...found.no_attention ?? [], ...found.unknown ?? [], ...found.softmax ?? []].map((one) => one.name ?? String(one));
  return listed.every((name) => lines.includes(name)) ? lines.filter((line) => !listed.includes(line)) : [];
}

export const which = {
  id: 'which',
  title: 'Which',
  question: 'Which attention kernel did my program run?',
  formFirst: true,
  lead: 'Paste names of GPU kernels, one a line, or a table of a profiler. Nothing leaves this page.',
  controls: [{name: 'names', label: 'Names of kernels', lines: 7}],
  defaults: {names: EXAMPLES},
  draw(values, say) {
    if (!values.names.trim()) return [element('p', {class: 'note'}, 'Paste at least one name.')];
    const found = command(['which', keepFile('names.txt', values.names)]).files[0];
    say(found.paragraph);
    return [element('p', {class: 'now'}, found.paragraph),
      ...found.attention.map(cardOf), others('No attention', found.no_attention), others('Unknown', found.unknown), others('A softmax of its own', found.softmax), others('Not known as attention', restOf(values.names, found)),
      ...(found.notes ?? []).map((note) => element('p', {class: 'note'}, note)),
      element('p', {class: 'command'}, element('code', {}, 'tessera which names.txt'), ' The command also reads traces of PyTorch, Nsight Systems and JAX.')];
  },
};
